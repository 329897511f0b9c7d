"""One run, on one rank or on many: the loop, the ranks, checkpoints, and what a run will hold and send."""

from .environment import stamp
from .launcher import LaunchFailed, launch
from .loop import train, try_train
from .planning import Plan, plan
from .world import open_mesh

__all__ = ["LaunchFailed", "Plan", "launch", "open_mesh", "plan", "stamp", "train", "try_train"]
