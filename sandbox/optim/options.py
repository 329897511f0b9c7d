"""What a parameter group may hold: names are translated, values checked, and all else is refused before any work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..fields import near

SCALAR = ("adamw", "lion")
# Keys that any group may hold and no rule reads: torch, its schedulers and our own builder write them.
BOOKKEEPING = frozenset({"params", "param_names", "algorithm", "role", "reason", "initial_lr", "step"})
_RANGES = {  # key -> smallest, largest, whether the ends themselves are allowed
    "lr": (0, math.inf, True, False),
    "initial_lr": (0, math.inf, True, False),
    "weight_decay": (0, math.inf, True, False),
    "epsilon": (0, math.inf, True, False),
    "mu": (0, 1, True, True),
    "beta1": (0, 1, True, False),
    "beta2": (0, 1, True, False),
    "muon_beta2": (0, 1, True, False),
    "ef_decay": (0, 1, True, True),
    "fraction": (0, 1, False, True),
    "rank_fraction": (0, 1, False, True),
}
_CHOICES = {
    "adjust_lr": ("spectral_norm", "rms_norm", None),
    "selection_scope": ("local", "global"),
    "qr_method": ("rcqr", "qr", "cqr"),
}
_FLAGS = frozenset({"cautious_wd", "nesterov", "flatten", "transposed"})
_COUNTS = frozenset({"num_heads", "rank_multiple_of", "power_iters"})


def translate(group: Mapping[str, Any], known: Iterable[str], *, where: str) -> dict[str, Any]:
    """Return a copy of ``group`` with ``betas`` and ``eps`` under this family's names and its values checked.

    Raises:
        ValueError: an unknown key (with near names), a key given twice, or a value that is not allowed.
    """
    group = dict(group)
    known = BOOKKEEPING | set(known)
    for theirs, ours in {"betas": ("beta1", "beta2"), "eps": ("epsilon",)}.items():
        if theirs in group:
            values = group.pop(theirs)
            values = tuple(values) if theirs == "betas" else (values,)
            if len(values) != len(ours) or any(name in group for name in ours):
                raise ValueError(f"{where}: {theirs}={values!r} was given; allowed is {' and '.join(ours)}, once")
            group |= zip(ours, values, strict=True)
    for key in group.keys() - known:
        raise ValueError(f"{where} has no option {key!r}: {near(str(key), known | {'betas', 'eps'})}")
    for key in group.keys() - {"params"}:
        group[key] = _checked(key, group[key], where)
    return group


def _checked(key: str, value: Any, where: str) -> Any:
    """Return the value as a plain one, or raise a ValueError that says what is allowed."""
    if key in _RANGES:
        low, high, from_low, to_high = _RANGES[key]
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if number and low <= value <= high and (from_low or value != low) and (to_high or value != high):
            return value
        allowed = f"a number in {'[' if from_low else '('}{low}, {high}{']' if to_high else ')'}"
    elif key in _FLAGS:
        if isinstance(value, bool):
            return value
        allowed = "True or False"
    elif key in _COUNTS:
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        allowed = "an integer of at least 1"
    elif key == "split_sizes":
        sizes = tuple(value) if isinstance(value, list | tuple) else ()
        if value is None or (len(sizes) > 1 and all(type(size) is int and size > 0 for size in sizes)):
            return value and sizes
        allowed = "two or more positive row counts"
    elif key in _CHOICES:
        if value in _CHOICES[key]:
            return value
        allowed = " or ".join(map(repr, _CHOICES[key]))
    else:
        return value
    raise ValueError(f"{where}: {key}={value!r} was given; allowed is {allowed}")


def scale(shape: tuple[int, ...], adjust_lr: str | None) -> float:
    """Return the factor on the rate of a fan_out x fan_in matrix (arXiv 2502.16982, section 2.2; upstream's names).

    ``spectral_norm``: sqrt(fan_out / fan_in), which gives the update an RMS-to-RMS operator norm of 1. ``rms_norm``:
    0.2 sqrt(max(fan_out, fan_in)), which gives it the RMS of an AdamW update. None: 1.
    """
    fan_out, fan_in = shape[-2:]
    if adjust_lr is None:
        return 1.0
    return math.sqrt(fan_out / fan_in) if adjust_lr == "spectral_norm" else 0.2 * math.sqrt(max(fan_out, fan_in))
