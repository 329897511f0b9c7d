"""A notebook-first sandbox for the Dion family of optimizers on small GPT models: ``import sandbox as sb``.

The names below are imported from their rooms when first used, so that ``import sandbox`` costs next to nothing.
"""

import importlib
import sys
import types
import typing

_ROOMS = {
    "config": (
        *("RunConfig", "ModelConfig", "DataConfig", "ScheduleConfig", "MeshConfig", "GroupPolicy"),
        *("Override", "Factory"),
        *("MuonConfig", "NorMuonConfig", "Dion2Config", "DionConfig", "AdamWConfig"),
    ),
    "model": ("GPT",),
    "groups": ("param_roles", "group_table"),
    "builder": ("build_dion_optimizer", "is_dion_optimizer"),
    "mesh": ("get_dion_mesh",),
    "world": ("open_mesh",),
    "record": ("RunRecord", "table", "curves", "arms"),
    "store": ("load_records",),
    "environment": ("stamp",),
    "train": ("train",),
    "launch": ("launch",),
    "plan": ("plan",),
    "sweep": ("grid", "sweep"),
    "compare": ("compare", "best", "summarize"),
    "plots": ("plot_loss", "plot_lr_sweep", "plot_groups", "plot_shares", "panels", "style"),
    "report": ("save_figure",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
_SUBMODULES = ("config", "data", "groups", "builder", "mesh", "world", "optim", "studies", "figures")

__all__ = sorted(_HOME)


def __getattr__(name: str) -> typing.Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES})


class _Package(types.ModuleType):
    """``sb.train`` is the function, although its room has the same name and importing a room would bind it here."""

    def __setattr__(self, name: str, value: typing.Any) -> None:
        if name not in _HOME:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
