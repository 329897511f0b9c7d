"""A notebook-first sandbox for the Dion family of optimizers on small GPT models: ``import sandbox as sb``.

The names below are imported from their rooms when first used, so that ``import sandbox`` costs next to nothing.
"""

import importlib
import typing

_ROOMS = {
    "config": (
        *("RunConfig", "ModelConfig", "DataConfig", "ScheduleConfig", "MeshConfig", "GroupPolicy"),
        *("Override", "Factory"),
        *("MuonConfig", "NorMuonConfig", "Dion2Config", "DionConfig", "AdamWConfig"),
    ),
    "model": ("GPT",),
    "groups": ("param_roles", "group_table", "build_dion_optimizer", "is_dion_optimizer", "get_dion_mesh"),
    "records": ("RunRecord", "table", "curves", "arms", "load_records", "compare", "best", "summarize"),
    "records.report": ("save_figure",),
    "training": ("train", "launch", "plan", "open_mesh", "stamp"),
    "sweeps": ("grid", "sweep"),
    "plots": ("plot_loss", "plot_lr_sweep", "plot_groups", "plot_shares", "panels", "style"),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
# Modules that notebooks reach as ``sb.data``, ``sb.figures``, ...
_MODULES = {name: name for name in ("config", "data", "groups", "builder", "mesh", "optim", "studies")}
_MODULES |= {"world": "training.world", "figures": "studies.figures"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> typing.Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
