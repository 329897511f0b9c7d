"""The reference module's contract, where code written against it looks; the room itself is ``groups.builder``."""

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
    """Return any other name of the room, ``_import_error`` among them, which it finds out when asked."""
    return getattr(_room, name)
