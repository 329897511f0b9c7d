"""What the figures read from their tables, and how they write its numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import pandas as pd


def need(frame: pd.DataFrame, *names: str) -> None:
    """Check that the columns are there.

    Raises:
        ValueError: one is missing; with near names.
    """
    for name in names:
        if name not in frame:
            raise ValueError(f"the table has no column {name!r}: {near(name, frame.columns)}")


def near(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: near names if there are any, else all known names."""
    known = sorted(map(str, known))
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known are {', '.join(map(repr, known))}"


def numbers(frame: pd.DataFrame, column: str) -> pd.Series:
    """Return a column as floats, with NaN for None.

    Raises:
        ValueError: it holds anything else.
    """
    try:
        return pd.to_numeric(frame[column]).astype(float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {column!r} was given, which does not hold numbers only: {error}") from None


def short(value: float) -> str:
    """Return a rate to two digits, other numbers as they are: 3e-4, 0.0032, 128."""
    if value >= 1 or value == 0:
        return f"{value:g}"
    return f"{value:.2g}" if value >= 1e-3 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")


def words(number: float) -> str:
    """Return a count to three digits, as in ``12.3 M``."""
    number = float(f"{number:.3g}")
    for power, unit in ((12, "T"), (9, "B"), (6, "M"), (3, "k")):
        if abs(number) >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return f"{number:g}"


def spread(counts: Iterable[int]) -> str:
    """Return ``3``, or ``2 to 3`` where the counts differ."""
    counts = sorted(set(counts))
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def count(number: int, noun: str) -> str:
    """Return ``1 run``, ``2 runs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
