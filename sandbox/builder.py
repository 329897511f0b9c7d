"""The reference module's contract under its short name. The code is in ``groups.builder``."""

from typing import Any

from .groups import builder as _room
from .groups.builder import (
    _get_dion_mesh,
    _separate_param_groups,
    build_dion_optimizer,
    build_optimizer,
    is_dion_optimizer,
    logger,
    separate_param_groups,
)

__all__ = [
    "_get_dion_mesh",
    "_separate_param_groups",
    "build_dion_optimizer",
    "build_optimizer",
    "is_dion_optimizer",
    "logger",
    "separate_param_groups",
]


def __getattr__(name: str) -> Any:
    """Return any other name of that module, such as ``_import_error``, which is found when it is asked for."""
    return getattr(_room, name)
