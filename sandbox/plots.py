"""The figures: a table in, matplotlib ``Axes`` out. Reads no file and trains nothing; pandas, numpy, matplotlib only.

Figures are drawn for one column of a paper (3.4 in, 7 pt) in the eight colours of Okabe and Ito, which people with
any kind of colour vision can tell apart (https://jfly.uni-koeln.de/color/). A role and an arm keep one colour and one
marker in all figures. ``matplotlib.rcParams`` is left as it was: all settings live in ``style()``.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

COLUMN, PAGE = 3.4, 7.0  # inches: one column, and both, of a two-column paper

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same on every machine
    "font.size": 7.0,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.0,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.0,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.35,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "figure.dpi": 160,  # large enough to read in a notebook
    "figure.max_open_warning": 0,  # a cell may draw more than 20; the notebook closes them at its end
}

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"  # the eighth, yellow, is too light for a line

ROLES = {"matrix": (SKY, "o"), "embed": (ORANGE, "s"), "lm_head": (GREEN, "^"), "vector": (PURPLE, "D")}
ARMS = {  # name -> how a reader calls it, colour, marker
    "adamw": ("AdamW", BLUE, "o"),
    "lion": ("Lion", VERMILLION, "s"),
    "muon": ("Muon", BLACK, "^"),
    "normuon": ("NorMuon", GREEN, "D"),
    "dion2": ("Dion2", PURPLE, "v"),
    "dion": ("Dion", ORANGE, "P"),
}
OTHERS = ((BLUE, "o"), (VERMILLION, "s"), (GREEN, "^"), (PURPLE, "D"), (BLACK, "v"), (ORANGE, "P"), (SKY, "X"))
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))

LABELS = {  # column -> axis label with its unit
    "optimizer.lr": "base learning rate, lr (per step)",
    "optimizer.embed_lr": "embedding learning rate, embed_lr (per step)",
    "optimizer.lm_head_lr": "LM-head learning rate, lm_head_lr (per step)",
    "optimizer.scalar_lr": "scalar learning rate, scalar_lr (per step)",
    "model.width": "model width (dimensions)",
    "train_loss": "training loss (nats/token)",
    "val_loss": "validation loss (nats/token)",
    "val_bpb": "validation loss (bits/byte)",
    "step": "training (steps)",
    "tokens": "training data (tokens)",
    "seconds": "training time (s)",
    "factor": "factor on every group's rate (1)",
}
_UNDOTTED = ("steps", "batch_size", "context", "grad_clip", "device", "dtype")  # fields of a run that make an arm, too


def style() -> contextlib.AbstractContextManager[None]:
    """Return a context in which matplotlib draws in this module's style; afterwards its settings are as before."""
    return matplotlib.rc_context(STYLE)


def panels(
    rows: int = 1, columns: int = 1, *, width: float = COLUMN, height: float | None = None
) -> tuple[Figure, Any]:
    """Return ``(figure, axes)`` in this module's style; ``axes`` is one Axes, or an array of them.

    Under IPython the figure belongs to pyplot, so that a notebook shows it once, at the end of its cell, and closes
    it. Elsewhere it belongs to nobody and goes with its last name: a loop leaks nothing.

    Args:
        rows: panels from top to bottom.
        columns: panels from left to right.
        width: inches; ``COLUMN`` or ``PAGE``.
        height: inches; None is 2.1 a row.
    """
    size = (width, height or 2.1 * rows)
    with style():
        if getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)():
            import matplotlib.pyplot as plt  # only here: pyplot picks a backend for the whole process

            figure = plt.figure(figsize=size, layout="constrained")
        else:
            figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots(rows, columns)


# Sweeps of a rate -----------------------------------------------------------------------------------------------------


def plot_lr_sweep(
    table: pd.DataFrame, ax: Axes | None = None, *, x: str, by: str | Sequence[str] | None = None, y: str = "val_loss"
) -> Axes:
    """Return the Axes of loss against a learning rate: each arm's mean over seeds, and every run as a point.

    The star is the lowest mean; the legend gives its rate and says so where it is the lowest or highest rate tried:
    that grid did not bracket its optimum. (A higher rate that diverged does bracket it.) A diverged run is a cross at
    the top edge; a rate at which any seed diverged has no mean, since the mean of the survivors would flatter it.
    Rates stand on a logarithmic axis; 0, which it cannot hold, has a tick of its own, one step of the grid below the
    lowest rate, beyond a dotted line. Runs that failed, were interrupted or lack the rate are counted in the legend.

    Args:
        table: one row a run: ``status``, ``x``, ``y``, and what varies (``record.table``).
        ax: where to draw; None makes a new figure.
        x: the column of rates, such as ``"optimizer.lm_head_lr"``.
        by: the columns that tell arms apart; None takes every config column that varies, never a seed.
        y: the column of losses; lower is better.

    Raises:
        ValueError: a column is missing (with near names), nothing is there to draw, or a rate is negative or no number.
    """
    table = pd.DataFrame(table)
    _need(table, "status", x, y)
    rates, losses = _numbers(table, x), _numbers(table, y)
    if (rates < 0).any():
        raise ValueError(f"{x}={rates.min():g} was given; allowed are rates of at least 0")
    lost = (table["status"] == "diverged") & rates.notna()
    shown = lost | ((table["status"] == "finished") & np.isfinite(losses) & rates.notna())
    if not shown.any():
        raise ValueError(f"no run of {len(table)} finished or diverged with a value of {x!r} and {y!r}")
    zero = _place_of_zero(rates[shown])
    frame = table.assign(_x=rates.replace(0, zero), _rate=rates, _y=losses, _lost=lost)[shown]
    arms = _arms(frame, by, x)
    own, ax = ax is None, _axes(ax)
    with style():
        handles = [_draw_sweep(ax, arm, edge=0.97 - 0.04 * i) for i, arm in enumerate(arms)]
        handles.append(_key("lowest mean", marker="*", ms=7, mfc="w", mec="k", mew=0.6))
        if lost.any():
            handles.append(_key(f"diverged ({_count(int(lost.sum()), 'run')})", marker="x", ms=4))
            low, high = ax.get_ylim()
            ax.set_ylim(low, high + (0.06 + 0.04 * len(arms)) * (high - low))  # room for the crosses
        if not shown.all():
            handles.append(_key(f"not shown: {_count(int((~shown).sum()), 'run')} without a result"))
        _log_axis(ax, frame["_rate"], zero)
        _finish(ax, own, _label(x), _label(y), handles)
    return ax


def _draw_sweep(ax: Axes, arm: _Arm, edge: float) -> Line2D:
    """Draw one arm and return its entry in the legend; ``edge`` is where its crosses go, as a part of the height."""
    fine, lost = arm.frame[~arm.frame["_lost"]], arm.frame[arm.frame["_lost"]]
    mean = arm.frame.groupby("_rate").agg(x=("_x", "first"), y=("_y", "mean"), lost=("_lost", "any"))
    mean.loc[mean["lost"], "y"] = math.nan
    tried = mean[mean.index > 0]  # the line does not cross the break to a rate of 0
    ax.plot(tried["x"], tried["y"], color=arm.color, ls=arm.dash)
    ax.plot(fine["_x"], fine["_y"], ls="", marker=arm.marker, ms=2.8, mfc=arm.color, mec="none", alpha=0.55)
    at_edge = {"transform": ax.get_xaxis_transform(), "ls": "", "marker": "x", "ms": 4}
    ax.plot(lost["_x"], [edge] * len(lost), color=arm.color, **at_edge)
    label = arm.label
    if mean["y"].notna().any():
        best = mean["y"].idxmin()
        ax.plot(mean["x"][best], mean["y"][best], marker="*", ms=8, mfc=arm.color, mec="k", mew=0.5, zorder=5)
        border = len(mean) > 1 and best in (tried.index.min(), tried.index.max())
        label += f": best {_rate(best)}" + (" (border of its grid)" if border else "")
    return _key(label, color=arm.color, ls=arm.dash, marker=arm.marker, ms=3)


def _place_of_zero(rates: pd.Series) -> float:
    """Return where 0 stands on a logarithmic axis: one step of the grid, at least a factor of 3, below the lowest."""
    tried = np.unique(rates[rates > 0])
    return float(tried[0] / max(3.0, np.median(tried[1:] / tried[:-1]) if len(tried) > 1 else 0)) if len(tried) else 1.0


def _log_axis(ax: Axes, rates: pd.Series, zero: float) -> None:
    """Make x logarithmic, with names at powers of ten where there are three, else at the rates tried."""
    tried = np.unique(rates[rates > 0])
    places = [*tried, zero] if (rates == 0).any() else list(tried)
    tens = [10.0**k for k in range(-12, 7) if len(tried) and tried[0] * 0.99 < 10.0**k < tried[-1] * 1.01]
    names = {t: _rate(t) for t in (tens if len(tens) > 2 else tried[:: math.ceil(len(tried) / 6) or 1])}
    if zero in places:
        names[zero] = "0"
        if len(tried):
            ax.axvline(math.sqrt(zero * tried[0]), color="0.5", lw=0.6, ls=":")
    ax.set_xscale("log")
    ax.set_xlim(min(places) / 1.4, max(places) * 1.4)
    ax.xaxis.set_major_locator(FixedLocator(list(names)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: names.get(v, "")))
    ax.xaxis.set_minor_locator(FixedLocator(list(tried)))
    ax.xaxis.set_minor_formatter(NullFormatter())


# Losses in time -------------------------------------------------------------------------------------------------------


def plot_loss(
    curves: pd.DataFrame,
    ax: Axes | None = None,
    *,
    by: str | Sequence[str] | None = None,
    y: Literal["train_loss", "val_loss"] = "train_loss",
    x: Literal["step", "tokens", "seconds"] = "step",
    smooth: int = 1,
) -> Axes:
    """Return the Axes of loss against training: each arm's mean over seeds, with a band from lowest to highest seed.

    A run that diverged is a thin line of its own, with a cross at its last finite loss (at the top edge, where that
    lies above all losses of the runs that did not); mean and band are of the others, and the legend says of how many.
    They end where the first of these runs ends; the rest go on as thin lines.

    Args:
        curves: one row a step of every run: ``config_hash``, ``status``, ``step``, ``x``, ``y``, and what varies
            (``record.curves``). Without ``status``, a run whose training loss is not finite somewhere has diverged.
        ax: where to draw; None makes a new figure.
        by: the columns that tell arms apart; None takes every config column that varies, never a seed.
        y: the column of losses; rows without it (``val_loss`` between evaluations) are passed over.
        x: what the arms are compared at equal amounts of.
        smooth: steps of a centred running mean, of each run; 1 shows every step. The axis label states it.

    Raises:
        ValueError: a column is missing (with near names), ``smooth`` is below 1, or nothing is there to draw.
    """
    curves = pd.DataFrame(curves)
    _need(curves, "config_hash", "step", x, y)
    if smooth < 1:
        raise ValueError(f"smooth={smooth} was given; allowed is at least 1 (steps)")
    losses = _numbers(curves, y)
    if not np.isfinite(losses).any():
        raise ValueError(f"no finite {y!r} is in the {len(curves)} rows of curves")
    lost = curves["status"] == "diverged" if "status" in curves else ~np.isfinite(curves.get("train_loss", losses))
    frame = curves.assign(_x=_numbers(curves, x), _y=losses.where(np.isfinite(losses)), _lost=lost).sort_values("step")
    frame["_lost"] = frame.groupby("config_hash")["_lost"].transform("any")
    arms = _arms(frame, by)
    own, ax = ax is None, _axes(ax)
    with style():
        top = float(frame["_y"].where(~frame["_lost"] | frame["_lost"].all()).max())
        handles = [_draw_loss(ax, arm, smooth, top) for arm in arms]
        if ax.collections:
            handles.append(Patch(fc="0.8", label="band: lowest to highest seed"))
        if frame["_lost"].any():
            runs = frame.loc[frame["_lost"], "config_hash"].nunique()
            handles.append(_key(f"diverged ({_count(runs, 'run')})", marker="x", ms=4))
        low = np.nanmin(np.minimum(frame["_y"], top))
        ax.set_ylim(low - 0.05 * (top - low), top + 0.05 * (top - low))
        ax.xaxis.set_major_locator(MaxNLocator(6))
        if x == "tokens":
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: words(v)))
        _finish(ax, own, _label(x), _label(y) + (f"\nmean of {smooth} steps" if smooth > 1 else ""), handles)
    return ax


def _draw_loss(ax: Axes, arm: _Arm, smooth: int, top: float) -> Line2D:
    """Draw one arm and return its entry in the legend; crosses stand at most at ``top``."""
    runs = {name: run.set_index("step") for name, run in arm.frame.groupby("config_hash")}
    wide = pd.DataFrame({name: _smoothed(run["_y"], smooth) for name, run in runs.items()})
    place = pd.DataFrame({name: run["_x"] for name, run in runs.items()}).mean(axis=1)
    fine = [name for name, run in runs.items() if not run["_lost"].any()]
    shared = wide[fine].dropna()
    look = {"color": arm.color, "ls": arm.dash}
    mark = {"marker": arm.marker, "ms": 3} if len(wide.dropna(how="all")) <= 25 else {}  # few enough to show each
    ax.plot(place[shared.index], shared.mean(axis=1), **look, **mark)
    if len(fine) > 1:
        ax.fill_between(place[shared.index], shared.min(axis=1), shared.max(axis=1), color=arm.color, alpha=0.2, lw=0)
    for name in runs:
        rest = wide[name].dropna()
        if name not in fine:
            step, end = (rest.index[-1], min(rest.iloc[-1], top)) if len(rest) else (runs[name].index[-1], top)
            ax.plot(place[step], end, marker="x", ms=5, color=arm.color, clip_on=False, zorder=5)
        elif len(shared):
            rest = rest.loc[shared.index[-1] :]
        ax.plot(place[rest.index], rest, lw=0.6, **look)
    count = f"{len(fine)} of {len(runs)} seeds" if len(fine) < len(runs) else f"{len(runs)} seeds"
    return _key(arm.label + (f" ({count})" if len(runs) > 1 else ""), **look, **mark)


def _smoothed(losses: pd.Series, smooth: int) -> pd.Series:
    return losses.dropna().rolling(smooth, min_periods=1, center=True).mean()


# Groups ---------------------------------------------------------------------------------------------------------------


def plot_groups(groups: pd.DataFrame, ax: Axes | None = None, *, by: str | None = None) -> Axes:
    """Return the Axes of who holds the elements: one horizontal bar a model, split by role, in percent.

    The legend gives each role's algorithm and rate, as a range where the bars differ. A part of a bar carries its
    number of elements, and below it its own rate where bars differ, as far as they fit.

    Args:
        groups: rows with ``role``, ``elements``, and where they are there ``algorithm`` and ``lr`` (a group table).
        ax: where to draw; None makes a new figure.
        by: the column that names a bar; None takes ``"model"``, else the first config column that varies, else one bar.

    Raises:
        ValueError: a column or a role is unknown (with near names), or one bar would hold models of different sizes.
    """
    groups = pd.DataFrame(groups)
    by = by or ("model" if "model" in groups else next(iter(_varying(groups)), None))
    sizes = _sizes(groups, by)
    totals = sizes.sum(axis=1)
    shares = sizes.div(totals, axis=0) * 100
    own, ax = ax is None, _axes(ax, height=0.55 + 0.32 * len(sizes))
    left, handles, texts = np.zeros(len(sizes)), [], []
    with style():
        for role in sizes:
            color, rows = ROLES[role][0], groups[groups["role"] == role]
            bars = ax.barh(range(len(sizes)), shares[role], 0.76, left=left, color=color, edgecolor="w", lw=0.4)
            handles.append(Patch(fc=color, label=role + (": " if _how(rows) else "") + ", ".join(_how(rows))))
            for bar, name in zip(bars, sizes.index, strict=True):
                how = _how(rows[rows[by] == name] if by else rows)
                lines = [words(sizes[role][name])] + ([] if how == _how(rows) else how[-1:])
                texts.append((bar, lines, ax.text(*bar.get_center(), "", ha="center", va="center", size=6)))
            left += shares[role].to_numpy()
        names = [
            f"{_value(by, name)}\n{words(totals[name])}" if by else f"{words(totals[name])} elements"
            for name in sizes.index
        ]
        ax.set_yticks(range(len(sizes)), names)
        ax.invert_yaxis()
        ax.set_xlim(0, 100)
        ax.grid(False)
        _finish(ax, own, "share of elements (%)", "model (elements)" if by else "", handles)
        _fit(ax, texts)
    return ax


def _fit(ax: Axes, texts: list[tuple[Any, list[str], Any]]) -> None:
    """Write into each bar as many of its lines as it has room for."""
    ax.figure.draw_without_rendering()  # the layout decides how wide a bar is
    for bar, lines, text in texts:
        for n in range(len(lines), 0, -1):
            text.set_text("\n".join(lines[:n]))
            if text.get_window_extent().width < 0.85 * bar.get_window_extent().width:
                break
        else:
            text.remove()


def _how(rows: pd.DataFrame) -> list[str]:
    """Return the algorithm and the rate of rows of a group table, as far as they are there, as a reader calls them."""
    names = [
        ARMS.get(_plain(a), (str(a),))[0] for a in rows.get("algorithm", pd.Series(dtype=object)).dropna().unique()
    ]
    rates = _numbers(rows, "lr").dropna() if "lr" in rows else pd.Series(dtype=float)
    ends = list(dict.fromkeys(_rate(r) for r in (rates.min(), rates.max()))) if len(rates) else []
    return ([" or ".join(names)] if names else []) + (["lr " + " to ".join(ends)] if ends else [])


def plot_shares(groups: pd.DataFrame, ax: Axes | None = None, *, x: str = "model.width") -> Axes:
    """Return the Axes of each role's share of the elements, in percent, against the width of the model.

    Args:
        groups: rows with ``role``, ``elements`` and ``x`` (the group tables of several models).
        ax: where to draw; None makes a new figure.
        x: the column of sizes, on a logarithmic axis.

    Raises:
        ValueError: a column or a role is unknown (with near names), ``x`` holds what is no positive number, or one
            value of it names models of different sizes.
    """
    groups = pd.DataFrame(groups)
    sizes = _sizes(groups, x)
    if not (_numbers(groups, x) > 0).all():
        raise ValueError(f"{x}={_numbers(groups, x).min():g} was given; allowed are sizes above 0")
    shares = sizes.div(sizes.sum(axis=1), axis=0) * 100
    own, ax = ax is None, _axes(ax)
    with style():
        over = {"embed": {"lw": 2.6, "ms": 5.5}, "lm_head": {"ls": DASHES[1], "ms": 3}}  # equal shares, if untied
        handles = []
        for role in shares:
            look = dict(zip(("color", "marker"), ROLES[role], strict=True)) | over.get(role, {})
            handles += ax.plot(shares[role], label=role, clip_on=False, **look)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(FixedLocator(list(shares.index)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_ylim(0, 100)
        _finish(ax, own, _label(x), "share of elements (%)", handles)
    return ax


def _sizes(groups: pd.DataFrame, by: str | None) -> pd.DataFrame:
    """Return elements, one row a value of ``by`` (numbers ascending, names as they come), one column a role."""
    _need(groups, "role", "elements", *([by] if by else []))
    for role in groups["role"].unique():
        if role not in ROLES:
            raise ValueError(f"role {role!r} was given: {_near(str(role), ROLES)}")
    bar = groups[by] if by else pd.Series("", index=groups.index)
    table = groups.assign(_bar=bar, _model=groups.get("config_hash", bar)).pivot_table(
        index=["_bar", "_model"], columns="role", values="elements", aggfunc="sum", fill_value=0, sort=False
    )
    each = table.groupby(level="_bar", sort=pd.api.types.is_numeric_dtype(bar))
    unlike = each.nunique().max(axis=1)
    if (unlike > 1).any():
        raise ValueError(f"{by}={unlike.idxmax()!r} names models of different sizes; give one model a value, or by=")
    return each.first()[[role for role in ROLES if role in table]]


# What all of them share -----------------------------------------------------------------------------------------------


class _Arm(NamedTuple):
    label: str
    color: str
    marker: str
    dash: Any
    frame: pd.DataFrame


def _arms(frame: pd.DataFrame, by: str | Sequence[str] | None, x: str | None = None) -> list[_Arm]:
    """Return the arms in a fixed order; colour and marker tell the first column apart, dashes the others."""
    columns = _varying(frame, x) if by is None else [by] if isinstance(by, str) else list(by)
    _need(frame, *columns)
    if not columns:
        return [_Arm("mean", *OTHERS[0], DASHES[0], frame)]
    parts = {key: part for key, part in frame.groupby(columns, dropna=False)}
    keys = sorted(parts, key=lambda key: [_order(v) for v in key])
    firsts, rests = (list(dict.fromkeys(map(str, part))) for part in ([k[0] for k in keys], [k[1:] for k in keys]))
    taken = [ARMS[_plain(v)][1] for v in firsts if _plain(v) in ARMS]
    free = [look for look in OTHERS if look[0] not in taken]
    arms = []
    for key in keys:
        turn, place = divmod(firsts.index(str(key[0])), len(free))
        known = ARMS.get(_plain(key[0]))
        dash = DASHES[(rests.index(str(key[1:])) + (0 if known else turn)) % len(DASHES)]
        label = ", ".join(filter(None, (_value(c, v) for c, v in zip(columns, key, strict=True))))
        arms.append(_Arm(label, *(known[1:] if known else free[place]), dash, parts[key]))
    return arms


def _varying(frame: pd.DataFrame, x: str | None = None) -> list[str]:
    """Return the config columns that tell arms apart: those that vary, less those that the ones before determine.

    Columns of known names come first. Numbers that move one to one with ``x`` are another name of it, and no arm.
    """
    found = [c for c in frame.columns if ("." in c or c in _UNDOTTED) and c != x]
    values = frame[found + ([x] if x else [])].astype(str).drop_duplicates()
    found.sort(key=lambda c: not any(_plain(v) in ARMS for v in values[c].unique()))
    count = lambda *columns: len(values[list(columns)].drop_duplicates())  # noqa: E731
    kept: list[str] = []
    for c in found:
        if x and pd.api.types.is_numeric_dtype(frame[c]) and count(c) == count(x) == count(c, x):
            continue
        if count(*kept, c) > (count(*kept) if kept else 1):
            kept.append(c)
    return kept


def _order(value: Any) -> tuple[int, float, str]:
    """Return what arms are sorted by: known names in their own order, then numbers, then other names, then nothing."""
    if _plain(value) in ARMS:
        return (0, list(ARMS).index(_plain(value)), "")
    if pd.isna(value):
        return (3, 0, "")
    return (2, 0, value) if isinstance(value, str) else (1, float(value), "")


def _plain(value: Any) -> str:
    return str(value).lower().removesuffix("config")


def _value(column: str, value: Any) -> str:
    """Return a value of a column as the legend says it."""
    if _plain(value) in ARMS:
        return ARMS[_plain(value)][0]
    if column == "model":
        return str(value)
    name = column.rsplit(".", 1)[-1]
    if pd.isna(value):
        return f"{name} default"
    return f"{name} {_rate(value) if isinstance(value, float) else value}"


def _axes(ax: Axes | None, height: float | None = None) -> Axes:
    return panels(height=height)[1] if ax is None else ax


def _finish(ax: Axes, own: bool, x: str, y: str, handles: list[Any]) -> None:
    """Label the axes and put the legend below them, where it hides nothing; a figure of its own grows by its height."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.tick_params(which="both", labelsize=STYLE["xtick.labelsize"], width=0.6, length=2.5)  # also of ticks made later
    ax.tick_params(which="minor", length=1.5)
    ax.figure.draw_without_rendering()  # the layout decides how much room there is
    inner, outer, inch = ax.get_window_extent(), ax.get_tightbbox(), ax.figure.dpi
    corner = ScaledTranslation(
        (outer.x0 - inner.x0) / inch, (outer.y0 - inner.y0) / inch - 0.06, ax.figure.dpi_scale_trans
    )
    for columns in range(min(4, len(handles)), 0, -1):
        legend = ax.legend(
            handles=handles,
            ncols=columns,
            loc="upper left",
            bbox_to_anchor=(0, 0),
            bbox_transform=ax.transAxes + corner,
        )
        if legend.get_window_extent().width <= inner.x1 - outer.x0:
            break
    if own:
        ax.figure.set_figheight(ax.figure.get_figheight() + legend.get_window_extent().height / inch)


def _key(label: str, **look: Any) -> Line2D:
    return Line2D([], [], label=label, **{"ls": "", "color": "0.3"} | look)


def _label(column: str) -> str:
    return LABELS.get(column) or column.rsplit(".", 1)[-1] + (" (per step)" if column.endswith("lr") else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _rate(value: float) -> str:
    """Return a rate to two digits: 0.003, 3e-4."""
    text = f"{value:.2g}"
    return text if value == 0 or 1e-3 <= value < 1e3 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")


def words(number: float) -> str:
    """Return a count as a reader says it, to three digits: ``12.3 M``."""
    number = float(f"{number:.3g}")
    for power, unit in ((12, "T"), (9, "B"), (6, "M"), (3, "k")):
        if abs(number) >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return f"{number:g}"


def _need(frame: pd.DataFrame, *names: str) -> None:
    for name in names:
        if name not in frame:
            raise ValueError(f"the table has no column {name!r}: {_near(name, frame.columns)}")


def _near(name: str, known: Iterable[str]) -> str:
    known = sorted(map(str, known))
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known are {', '.join(map(repr, known))}"


def _numbers(frame: pd.DataFrame, column: str) -> pd.Series:
    """Return a column as floats, with NaN for None.

    Raises:
        ValueError: it holds anything else.
    """
    try:
        return pd.to_numeric(frame[column]).astype(float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {column!r} was given with what is no number: {error}") from None
