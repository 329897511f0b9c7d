"""The named ablations: their runs by preset, and the figures that show what came out."""

from .models import group_tables, growing_models, known_models
from .presets import (
    PRESETS,
    Preset,
    Study,
    base_optimizer,
    base_run,
    compared,
    embed_rate,
    grouping,
    head_rate,
    log_spaced,
    optimizers,
    preset,
    scalar_opt,
    scalar_rate,
)

__all__ = [
    "PRESETS",
    "Preset",
    "Study",
    "base_optimizer",
    "base_run",
    "compared",
    "embed_rate",
    "group_tables",
    "grouping",
    "growing_models",
    "head_rate",
    "known_models",
    "log_spaced",
    "optimizers",
    "preset",
    "scalar_opt",
    "scalar_rate",
]
