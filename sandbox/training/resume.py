"""Going on from a checkpoint: where the checkpoints of a run lie, and what of its record they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..config import RunConfig
from ..records import RunRecord
from ..records.files import home
from . import checkpoint
from .environment import identity
from .world import World

COLUMNS = ("curve", "evaluations", "rms")  # of the record, kept in a checkpoint


def checkpoint_folder(run: RunConfig) -> Path:
    """Return the folder of a run's checkpoints. It does not depend on the mesh: any number of ranks finds it."""
    return home() / "checkpoints" / replace(run, mesh=None).hash


class Resume:
    """The checkpoints of one run."""

    def __init__(self, run: RunConfig, folder: Path | None, world: World) -> None:
        self.key = {"run": replace(run, mesh=None).hash} | identity(run)
        self.folder: Path = world.of_first(checkpoint_folder(run) if folder is None else Path(folder))

    def load(self, record: RunRecord, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest complete checkpoint, if there is one, and return how many steps it has."""
        meta = checkpoint.load(self.folder, self.key, model=model, optimizer=optimizer)
        if meta is None:
            return 0
        for name in COLUMNS:
            setattr(record, name, meta[name])
        steps: int = meta["step"]
        return steps

    def save(self, step: int, record: RunRecord, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write a checkpoint after ``step`` steps."""
        columns = {name: getattr(record, name) for name in COLUMNS}
        checkpoint.save(self.folder, {"key": self.key, "step": step} | columns, model=model, optimizer=optimizer)
