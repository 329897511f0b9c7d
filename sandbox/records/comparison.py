"""What may be claimed from a table of runs: differences between arms, against seed noise, paired by seed. pandas only.

An *arm* is one combination of the dotted columns that vary; its seeds are its repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

SEEDS = ("seed", "data_seed")  # columns that count repetitions
_RESULTS = ("config_hash", "status", "val_loss", "val_bpb")


def arm_columns(table: pd.DataFrame) -> list[str]:
    """Return the columns that tell arms apart: all but results and seeds."""
    return [name for name in table.columns if name not in (*_RESULTS, *SEEDS)]


def summarize(table: pd.DataFrame, *, by: Sequence[str] | None = None, y: str = "val_loss") -> pd.DataFrame:
    """Return one row an arm: its columns, ``mean`` and ``standard_error`` of ``y`` over seeds, ``n``, ``diverged``.

    If any run of an arm did not finish, its mean is NaN: the seeds that did finish would make it look too good. The
    standard error of one seed is NaN.
    """
    columns = list(by) if by is not None else arm_columns(table)
    _need(table, [*columns, y, "status"])
    rows = []
    for values, runs in table.groupby(columns, dropna=False, sort=True) if columns else [((), table)]:
        whole = bool((runs["status"] == "finished").all())
        rows.append(
            dict(zip(columns, values, strict=True))
            | {
                "mean": float(runs[y].mean()) if whole else math.nan,
                "standard_error": _standard_error(runs[y]) if whole else math.nan,
                "n": len(runs),
                "diverged": int((runs["status"] != "finished").sum()),
            }
        )
    return pd.DataFrame(rows)


def best(table: pd.DataFrame, *, by: str | Sequence[str] = (), y: str = "val_loss") -> pd.DataFrame:
    """Return, for each value of ``by``, the arm with the lowest mean of ``y`` over seeds, as a row of ``summarize``.

    Raises:
        ValueError: a column that the table lacks, or no arm finished on all its seeds.
    """
    by = [by] if isinstance(by, str) else list(by)
    _need(table, by)
    arms = summarize(table, y=y).dropna(subset="mean")
    if arms.empty:
        raise ValueError(f"no arm finished on all its seeds; statuses are {sorted(set(table['status']))}")
    rows = arms.groupby(by, dropna=False)["mean"].idxmin() if by else [arms["mean"].idxmin()]
    return arms.loc[rows].reset_index(drop=True)


def compare(table: pd.DataFrame, *, baseline: Mapping[str, Any], y: str = "val_loss") -> pd.DataFrame:
    """Return one row an arm: the mean ``difference`` to the baseline, paired by seed, its ``standard_error`` and ``n``.

    Negative is better than the baseline. A pair counts where both runs finished; the standard error is that of the
    paired differences (sample standard deviation over the square root of n), NaN for one pair.

    Args:
        table: one row a run, as ``sb.table`` returns it.
        baseline: columns and values that select one arm, as in ``{"optimizer.scalar_opt": "adamw"}``.
        y: the column compared.

    Raises:
        ValueError: a column that the table lacks, or a baseline that selects no arm or several.
    """
    _need(table, [*baseline, y])
    columns, pairing = arm_columns(table), [name for name in SEEDS if name in table]
    chosen = table
    for name, value in baseline.items():
        chosen = chosen[chosen[name].isna() if value is None else chosen[name] == value]
    arms = chosen[columns].drop_duplicates()
    if len(arms) != 1:
        raise ValueError(f"baseline {dict(baseline)} was given, which selects {len(arms)} arms; allowed is one")
    reference = chosen[chosen["status"] == "finished"].set_index(pairing)[y]
    rows = []
    for values, runs in table.groupby(columns, dropna=False, sort=True) if columns else [((), table)]:
        if runs.index.equals(chosen.index):
            continue
        differences = (runs[runs["status"] == "finished"].set_index(pairing)[y] - reference).dropna()
        rows.append(
            dict(zip(columns, values, strict=True))
            | {
                "difference": float(differences.mean()),
                "standard_error": _standard_error(differences),
                "n": len(differences),
            }
        )
    return pd.DataFrame(rows)


def _standard_error(values: pd.Series) -> float:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _need(table: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in table]
    if missing:
        raise ValueError(f"column {missing[0]!r} was given; the table has {', '.join(map(repr, table.columns))}")
