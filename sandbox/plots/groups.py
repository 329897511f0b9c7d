"""How a model's elements are shared out between the roles, and how that changes with its size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .arms import DASHES, NAMES, ROLES, plain, value_label, varying
from .canvas import axis_label, finish, panels, style
from .tables import near, need, numbers, short, words


def plot_groups(groups: pd.DataFrame, ax: Axes | None = None, *, by: str | None = None) -> Axes:
    """Return the Axes of each role's share of the elements: one horizontal bar for each model, in percent.

    The legend gives each role's algorithm and rate, as a range where the bars differ. Where there is room, a part of a
    bar shows its number of elements and, if bars differ, its own rate.

    Args:
        groups: rows with ``role``, ``elements`` and perhaps ``algorithm`` and ``lr`` (a group table).
        ax: where to draw; None makes a new figure.
        by: the column that names a bar; None: ``"model"``, else the first config column that varies, else one bar.

    Raises:
        ValueError: a column or a role is unknown (with near names), or one bar would hold models of different sizes.
    """
    groups = pd.DataFrame(groups)
    by = by or ("model" if "model" in groups else next(iter(varying(groups)), None))
    sizes = _sizes(groups, by)
    totals = sizes.sum(axis=1)
    shares = sizes.div(totals, axis=0) * 100
    fresh, ax = ax is None, panels(height=max(1.3 if by else 0, 0.55 + 0.32 * len(sizes)))[1] if ax is None else ax
    left, handles = np.zeros(len(sizes)), []
    texts: list[tuple[Any, list[str], Any]] = []
    with style():
        for role in map(str, sizes):
            color, rows = ROLES[role][0], groups[groups["role"] == role]
            bars = ax.barh(range(len(sizes)), shares[role], 0.76, left=left, color=color, edgecolor="w", lw=0.4)
            handles.append(Patch(fc=color, label=role + (": " if _how(rows) else "") + ", ".join(_how(rows))))
            for bar, name in zip(bars, sizes.index, strict=True):
                how = _how(rows[rows[by] == name] if by else rows)
                lines = [words(sizes[role][name])] + ([] if how == _how(rows) else how[-1:])
                x, y = bar.get_center()
                texts.append((bar, lines, ax.text(x, y, "", ha="center", va="center", size=6)))
            left += shares[role].to_numpy()
        names = [
            f"{value_label(by, name)}\n{words(totals[name])}" if by else f"{words(totals[name])} elements"
            for name in sizes.index
        ]
        ax.set_yticks(range(len(sizes)), names)
        ax.invert_yaxis()
        ax.set_xlim(0, 100)
        ax.grid(False)
        finish(ax, "share of elements (%)", "model (elements)" if by else "", handles, grow=fresh)
        _fit(ax, texts)
    return ax


def _fit(ax: Axes, texts: list[tuple[Any, list[str], Any]]) -> None:
    """Write into each bar as many of its lines as it has room for."""
    ax.figure.figure.draw_without_rendering()  # the layout decides how wide a bar is
    for bar, lines, text in texts:
        for n in range(len(lines), 0, -1):
            text.set_text("\n".join(lines[:n]))
            if text.get_window_extent().width < 0.9 * bar.get_window_extent().width:
                break
        else:
            text.remove()


def _how(rows: pd.DataFrame) -> list[str]:
    """Return the algorithm and the rate of rows of a group table in words, as far as there are any."""
    names = [
        NAMES.get(plain(a), (str(a),))[0] for a in rows.get("algorithm", pd.Series(dtype=object)).dropna().unique()
    ]
    rates = numbers(rows, "lr").dropna() if "lr" in rows else pd.Series(dtype=float)
    ends = list(dict.fromkeys(short(r) for r in (rates.min(), rates.max()))) if len(rates) else []
    return ([" or ".join(names)] if names else []) + (["lr " + " to ".join(ends)] if ends else [])


def plot_shares(groups: pd.DataFrame, ax: Axes | None = None, *, x: str = "model.width") -> Axes:
    """Return the Axes of each role's share of the elements, in percent, against the width of the model.

    Args:
        groups: rows with ``role``, ``elements`` and ``x`` (the group tables of several models).
        ax: where to draw; None makes a new figure.
        x: the column of sizes, on a logarithmic axis.

    Raises:
        ValueError: a column or a role is unknown (with near names), ``x`` holds something that is no positive number,
            or one value of it names models of different sizes.
    """
    groups = pd.DataFrame(groups)
    sizes = _sizes(groups, x)
    if not (numbers(groups, x) > 0).all():
        raise ValueError(f"{x}={numbers(groups, x).min():g} was given; allowed are sizes above 0")
    shares = sizes.div(sizes.sum(axis=1), axis=0) * 100
    fresh, ax = ax is None, panels()[1] if ax is None else ax
    with style():
        over: dict[str, dict[str, Any]] = {
            "embed": {"lw": 2.6, "ms": 5.5},
            "lm_head": {"ls": DASHES[1], "ms": 3},
        }  # equal shares, if untied
        handles: list[Any] = []
        for role in map(str, shares):
            color, marker = ROLES[role]
            look = {"color": color, "marker": marker} | over.get(role, {})
            handles += ax.plot(shares[role], label=role, clip_on=False, **look)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(FixedLocator(list(shares.index)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_ylim(0, 100)
        finish(ax, axis_label(x), "share of elements (%)", handles, grow=fresh)
    return ax


def _sizes(groups: pd.DataFrame, by: str | None) -> pd.DataFrame:
    """Return elements: a row for each value of ``by`` (numbers ascending, names in order), a column for each role."""
    need(groups, "role", "elements", *([by] if by else []))
    for role in groups["role"].unique():
        if role not in ROLES:
            raise ValueError(f"role {role!r} was given: {near(str(role), ROLES)}")
    bar = groups[by] if by else pd.Series("", index=groups.index)
    table = groups.assign(_bar=bar, _model=groups.get("config_hash", bar)).pivot_table(
        index=["_bar", "_model"], columns="role", values="elements", aggfunc="sum", fill_value=0, sort=False
    )
    each = table.groupby(level="_bar", sort=pd.api.types.is_numeric_dtype(bar))
    unlike = each.nunique().max(axis=1)
    if (unlike > 1).any():
        raise ValueError(f"{by}={unlike.idxmax()!r} names models of different sizes; give one model a value, or by=")
    return each.first()[[role for role in ROLES if role in table]]
