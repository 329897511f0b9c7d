"""The arms of a table, and the one colour and marker that an arm or a role has in all figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from .tables import need, short

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"  # https://jfly.uni-koeln.de/color/
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"  # the eighth, yellow, is too light for a line

ROLES = {"matrix": (SKY, "o"), "embed": (ORANGE, "s"), "lm_head": (GREEN, "^"), "vector": (PURPLE, "D")}
NAMES = {  # an optimizer -> its name in a legend, colour, marker
    "adamw": ("AdamW", BLUE, "o"),
    "lion": ("Lion", VERMILLION, "s"),
    "muon": ("Muon", BLACK, "^"),
    "normuon": ("NorMuon", GREEN, "D"),
    "dion2": ("Dion2", PURPLE, "v"),
    "dion": ("Dion", ORANGE, "P"),
}
OTHERS = ((BLUE, "o"), (VERMILLION, "s"), (GREEN, "^"), (PURPLE, "D"), (BLACK, "v"), (ORANGE, "P"), (SKY, "X"))
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))

_UNDOTTED = (  # fields of a run itself; where they vary, they tell arms apart like dotted ones
    *("steps", "batch_size", "context", "grad_clip", "threads", "device", "dtype", "eval_every", "eval_tokens"),
)


class Arm(NamedTuple):
    """One arm: its part of a table, and its look."""

    label: str
    color: str
    marker: str
    dash: Any
    frame: pd.DataFrame


def arms(frame: pd.DataFrame, by: str | Sequence[str] | None, x: str | None = None) -> list[Arm]:
    """Return the arms in a fixed order. Colour and marker show the first column, dashes the others.

    Args:
        frame: a table of runs or of their steps.
        by: the columns that tell arms apart; None: ``varying(frame, x)``. If there are none, there is one arm.
        x: the column that the figure has on its x axis.

    Raises:
        ValueError: a column is missing, with near names.
    """
    columns = varying(frame, x) if by is None else [by] if isinstance(by, str) else list(by)
    need(frame, *columns)
    if not columns:
        return [Arm("all runs", *OTHERS[0], DASHES[0], frame)]
    parts = {key: part for key, part in frame.groupby(columns, dropna=False)}
    keys = sorted(parts, key=lambda key: [_order(v) for v in key])
    firsts, rests = (list(dict.fromkeys(map(str, part))) for part in ([k[0] for k in keys], [k[1:] for k in keys]))
    taken = [NAMES[plain(v)][1] for v in firsts if plain(v) in NAMES]
    free = [look for look in OTHERS if look[0] not in taken] or OTHERS
    found = []
    for key in keys:
        turn, place = divmod(firsts.index(str(key[0])), len(free))
        color, marker = NAMES[plain(key[0])][1:] if plain(key[0]) in NAMES else free[place]
        turn = rests.index(str(key[1:])) + (0 if plain(key[0]) in NAMES else turn)
        label = ", ".join(value_label(c, v) for c, v in zip(columns, key, strict=True))
        found.append(Arm(label, color, marker, DASHES[turn % len(DASHES)], parts[key]))
    return found


def varying(frame: pd.DataFrame, x: str | None = None) -> list[str]:
    """Return the config columns that tell arms apart: those that vary and do not follow from the ones before.

    Columns of optimizers come first. Numbers that change one to one with ``x`` are left out: they are ``x`` again.
    """
    found = [c for c in frame.columns if ("." in c or c in _UNDOTTED) and c != x]
    values = frame[found + ([x] if x else [])].astype(str).drop_duplicates()
    optimizers = {c for c in found if any(plain(v) in NAMES for v in values[c].unique())}
    found.sort(key=lambda c: c not in optimizers)

    def distinct(*columns: str) -> int:
        return len(values[list(columns)].drop_duplicates()) if columns else 1

    kept: list[str] = []
    for c in found:
        renamed = x and pd.api.types.is_numeric_dtype(frame[c]) and distinct(c) == distinct(x) == distinct(c, x)
        if not renamed and distinct(*kept, c) > distinct(*kept):
            kept.append(c)
    return kept


def plain(value: Any) -> str:
    """Return the key of an optimizer in ``NAMES``: ``"MuonConfig"`` and ``"muon"`` are the same."""
    return str(value).lower().removesuffix("config")


def value_label(column: str, value: Any) -> str:
    """Return a value of a column as a legend shows it: ``AdamW``, ``width 128``, ``lm_head_lr default``."""
    name = column.rsplit(".", 1)[-1]
    if plain(value) in NAMES:
        return NAMES[plain(value)][0]
    if name in ("model", "name"):  # names need no column; of a factory's name the last part is enough
        return str(value).rpartition(":")[2]
    if pd.isna(value):
        return f"{name} default"
    return f"{name} {short(value) if isinstance(value, float) else value}"


def _order(value: Any) -> tuple[int, float, str]:
    """Return the sorting key of arms: optimizers in the order of ``NAMES``, then numbers, other names, missing."""
    if plain(value) in NAMES:
        return (0, list(NAMES).index(plain(value)), "")
    if pd.isna(value):
        return (3, 0, "")
    return (2, 0, value) if isinstance(value, str) else (1, float(value), "")
