"""Many runs: grids of configurations, and sweeps that train them in parallel, cached and resumable."""

from .grids import grid, read_spec, runs_of
from .sweeping import sweep

__all__ = ["grid", "read_spec", "runs_of", "sweep"]
