"""The group table: which parameters are in which group, at which rate, and why."""

from __future__ import annotations

import re
import typing
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..config import AdamWConfig
from .separate import Groups, low_share, model_groups

if typing.TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("role", "algorithm", "tensors", "elements", "share", "lr", "weight_decay", "reason", "names")


def group_table(source: nn.Module | torch.optim.Optimizer | Groups, config: Any = None) -> pd.DataFrame:
    """Return one row a group: role, algorithm, tensors, elements, share, lr, weight_decay, reason, names.

    ``source`` is a model (with the optimizer's ``config``; without it there are no rates), a built optimizer of any
    kind, or groups. ``share`` is of all elements in the table. ``lr`` and ``weight_decay`` are the group's own, before
    the schedule. The Dion family also multiplies the step of a matrix (not its decay) by a factor of its shape:
    sqrt(fan_out/fan_in) for "spectral_norm" and for Dion, 0.2 sqrt(max(fan_out, fan_in)) for "rms_norm". "(?)" after a
    reason marks a parameter that was taken as a matrix because nothing says what it is. All values are JSON values.

    Raises:
        ValueError: as ``role_groups``, for a model.

    Warns:
        UserWarning: for a model, when under half of its elements are under the orthogonal optimizer.
    """
    import pandas as pd  # takes longer to import than all else here

    default = None if config is None else type(config).__name__.removesuffix("Config").lower()
    if isinstance(source, nn.Module):
        groups = model_groups(source, config)
        sentence = low_share(groups)
        if sentence and not isinstance(config, AdamWConfig):
            warnings.warn(sentence, stacklevel=2)
    elif isinstance(source, torch.optim.Optimizer):
        groups, default = source.param_groups, type(source).__name__.lower()
    else:
        groups = source
    total = sum(p.numel() for group in groups for p in group["params"])
    return pd.DataFrame([_row(group, total, config, default) for group in groups], columns=list(COLUMNS))


def _row(group: dict[str, Any], total: int, config: Any, default: str | None) -> dict[str, Any]:
    elements = sum(p.numel() for p in group["params"])
    lr = group.get("initial_lr", group.get("lr", getattr(config, "lr", None)))
    decay = group.get("weight_decay", getattr(config, "weight_decay", None))
    return {
        "role": group.get("role"),
        "algorithm": group.get("algorithm", default),
        "tensors": len(group["params"]),
        "elements": elements,
        "share": elements / total if total else 0.0,
        "lr": None if lr is None else float(lr),
        "weight_decay": None if decay is None else float(decay),
        "reason": group.get("reason", ""),
        "names": brief(group.get("param_names", ())),
    }


def brief(names: Sequence[str]) -> str:
    """Return names in one line; of more than six, block numbers in a row become ranges: ``blocks.0-11.q.weight``."""
    if len(names) <= 6:
        return ", ".join(names)
    runs: dict[tuple[str, ...], list[list[int]]] = {}
    for name in names:
        parts = re.split(r"(?<![^.])(\d+)(?![^.])", name)
        runs.setdefault(tuple(parts[::2]), []).append([int(number) for number in parts[1::2]])
    return ", ".join(_ranged(texts, numbers) for texts, numbers in runs.items())


def _ranged(texts: tuple[str, ...], numbers: list[list[int]]) -> str:
    line = texts[0]
    for text, column in zip(texts[1:], zip(*numbers, strict=True), strict=True):
        found = sorted(set(column))
        whole = len(found) > 1 and found == list(range(found[0], found[-1] + 1))
        line += (f"{found[0]}-{found[-1]}" if whole else "|".join(map(str, found))) + text
    return line
