"""Loss against a learning rate: where is the optimum, and did the grid reach it?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from .arms import Arm, arms
from .canvas import axis_label, entry, finish, panels, style
from .tables import count, need, numbers, short, spread


def plot_lr_sweep(
    table: pd.DataFrame, ax: Axes | None = None, *, x: str, by: str | Sequence[str] | None = None, y: str = "val_loss"
) -> Axes:
    """Return the Axes of loss against a learning rate: each arm's mean over seeds, and every run as a point.

    - The star is the lowest mean. The legend gives its rate, and says if it is the lowest or highest rate tried, so
      that the optimum may lie outside the grid. (A higher rate that diverged counts as tried.)
    - A rate at which any seed did not finish has no mean: the other seeds would make it look too good.
    - A diverged run is a cross at the top edge. Runs that failed, were interrupted or have no rate are counted in the
      legend.
    - The axis of rates is logarithmic. A rate of 0 gets its own tick, one step of the grid below the lowest rate,
      behind a dotted line.

    Args:
        table: one row a run: ``status``, ``x``, ``y``, and what varies (``record.table``).
        ax: where to draw; None makes a new figure.
        x: the column of rates, such as ``"optimizer.lm_head_lr"``.
        by: the columns that tell arms apart; None takes every config column that varies, never a seed.
        y: the column of losses; lower is better.

    Raises:
        ValueError: a column is missing (with near names), there is nothing to draw, or a rate is negative or no number.
    """
    table = pd.DataFrame(table)
    need(table, "status", x, y)
    if "config_hash" in table:
        table = table.drop_duplicates("config_hash")  # a run may stand in two sweeps
    rates, losses = numbers(table, x), numbers(table, y)
    if (rates < 0).any():
        raise ValueError(f"{x}={rates.min():g} was given; allowed are rates of at least 0")
    done = (table["status"] == "finished") & np.isfinite(losses) & rates.notna()
    lost = (table["status"] == "diverged") & rates.notna()
    if not (done | lost).any():
        raise ValueError(f"no run of {len(table)} finished or diverged with a value of {x!r} and {y!r}")
    zero = _place_of_zero(rates[done | lost])
    frame = table.assign(_x=rates.replace(0, zero), _rate=rates, _y=losses, _done=done, _lost=lost)
    found = arms(frame[rates.notna()], by, x)
    fresh, ax = ax is None, panels()[1] if ax is None else ax
    with style():
        handles = [_draw(ax, arm, edge=0.97 - 0.04 * i) for i, arm in enumerate(found)]
        if done.any():
            seeds = spread(n for arm in found for n in arm.frame.groupby("_rate").size())
            means = f"mean of {seeds} seeds" if seeds != "1" else "loss"
            handles.append(entry(f"lowest {means}", marker="*", ms=7, mfc="w", mec="k", mew=0.6))
        if lost.any():
            handles.append(entry(f"diverged ({count(int(lost.sum()), 'run')})", marker="x", ms=4))
            low, high = ax.get_ylim()
            ax.set_ylim(low, low + (high - low) / max(0.5, 0.95 - 0.04 * len(found)))  # room for the crosses
        if missing := int((~done & ~lost).sum()):
            handles.append(entry(f"not shown: {count(missing, 'run')} without a result"))
        _log_axis(ax, rates[done | lost], zero)
        finish(ax, axis_label(x), axis_label(y), handles, grow=fresh)
    return ax


def _draw(ax: Axes, arm: Arm, edge: float) -> Line2D:
    """Draw one arm and return its entry in the legend; its crosses go to ``edge``, a part of the height."""
    fine, lost = arm.frame[arm.frame["_done"]], arm.frame[arm.frame["_lost"]]
    rates = arm.frame.groupby("_rate").agg(x=("_x", "first"), y=("_y", "mean"), whole=("_done", "all"))
    rates["y"] = rates["y"].where(rates["whole"])
    positive = rates[rates.index > 0]  # the line does not cross the break to a rate of 0
    ax.plot(positive["x"], positive["y"], color=arm.color, ls=arm.dash)
    ax.plot(fine["_x"], fine["_y"], ls="", marker=arm.marker, ms=2.8, mfc=arm.color, mec="none", alpha=0.55)
    top = ax.get_xaxis_transform()  # x in data, y as a part of the height
    ax.plot(lost["_x"], [edge] * len(lost), ls="", marker="x", ms=4, color=arm.color, transform=top)
    label = arm.label
    if rates["y"].notna().any():
        best: Any = rates["y"].idxmin()
        ax.plot(rates["x"][best], rates["y"][best], marker="*", ms=8, mfc=arm.color, mec="k", mew=0.5, zorder=5)
        tried = pd.concat([fine, lost])["_rate"]
        border = tried.nunique() > 1 and best in (tried[tried > 0].min(), tried.max())
        label += f": best {short(best)}" + (" (border of its grid)" if border else "")
    return entry(label, color=arm.color, ls=arm.dash, marker=arm.marker, ms=3)


def _place_of_zero(rates: pd.Series) -> float:
    """Return the place of 0 on a logarithmic axis: below the lowest rate by a step of the grid, at least a factor 3."""
    tried = np.unique(rates[rates > 0])
    step = np.median(tried[1:] / tried[:-1]) if len(tried) > 1 else 3.0
    return float(tried[0] / max(3.0, step)) if len(tried) else 1.0


def _log_axis(ax: Axes, rates: pd.Series, zero: float) -> None:
    """Make x logarithmic, with labels at powers of ten if there are three or more, else at the rates tried."""
    tried = np.unique(rates[rates > 0])
    places = [*tried, zero] if (rates == 0).any() else list(tried)
    tens = [10.0**k for k in range(-12, 7) if len(tried) and tried[0] * 0.99 < 10.0**k < tried[-1] * 1.01]
    shown = tens if len(tens) > 2 else list(tried)
    names = {t: short(t) for t in shown[:: math.ceil(len(shown) / 6) or 1]}  # more labels would overlap
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
