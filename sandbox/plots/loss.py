"""Loss against steps, tokens or seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .arms import Arm, arms
from .canvas import axis_label, entry, finish, panels, style
from .tables import count, need, numbers, spread, words


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

    A run that diverged is a thin line, with a cross at its last finite loss. The cross is at the top edge if that loss
    is above all losses of the other runs (above the first losses, if all diverged). Mean and band are those of the
    other runs, and the legend says of how many. They end where the first of these runs ends; the rest of longer ones is
    a thin line.

    Args:
        curves: one row a step of every run: ``config_hash``, ``status``, ``step``, ``x``, ``y``, and what varies
            (``record.curves``). Without ``status``, a run whose training loss is not finite somewhere has diverged.
        ax: where to draw; None makes a new figure.
        by: the columns that tell arms apart; None takes every config column that varies, never a seed.
        y: the column of losses; rows without it (``val_loss`` between evaluations) are left out.
        x: the horizontal axis.
        smooth: how many losses a centred running mean of each run takes in; 1: none. The axis label says it.

    Raises:
        ValueError: a column is missing (with near names), ``smooth`` is below 1, or there is nothing to draw.
    """
    curves = pd.DataFrame(curves)
    need(curves, "config_hash", "step", x, y)
    curves = curves.drop_duplicates(["config_hash", "step"])  # a run may stand in two sweeps
    if smooth < 1:
        raise ValueError(f"smooth={smooth} was given; allowed is at least 1")
    losses = numbers(curves, y)
    if not np.isfinite(losses).any():
        raise ValueError(f"no finite {y!r} is in the {len(curves)} rows of curves")
    lost = curves["status"] == "diverged" if "status" in curves else ~np.isfinite(curves.get("train_loss", losses))
    frame = curves.assign(_x=numbers(curves, x), _y=losses.where(np.isfinite(losses)), _lost=lost).sort_values("step")
    runs = frame.groupby("config_hash")
    frame["_lost"] = runs["_lost"].transform("any")
    frame["_y"] = runs["_y"].transform(lambda run: run.dropna().rolling(smooth, min_periods=1, center=True).mean())
    fine = frame.loc[~frame["_lost"], "_y"] if (~frame["_lost"] & frame["_y"].notna()).any() else _first(frame)
    low, top = float(np.fmin(frame["_y"].min(), fine.min())), float(fine.max())
    margin = 0.05 * (top - low) or 0.05
    found = arms(frame, by)
    fresh, ax = ax is None, panels()[1] if ax is None else ax
    with style():
        handles: list[Any] = [_draw(ax, arm, top) for arm in found]
        if ax.collections:
            seeds = spread([arm.frame["config_hash"].nunique() for arm in found])
            handles.append(Patch(fc="0.8", label=f"band: lowest to highest of {seeds} seeds"))
        if frame["_lost"].any():
            lost = frame.loc[frame["_lost"], "config_hash"].nunique()
            handles.append(entry(f"diverged ({count(lost, 'run')})", marker="x", ms=4))
        ax.set_ylim(low - margin, top + margin)
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        if x == "tokens":
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: words(v)))
        smoothed = f"\nmean of {smooth} {'evaluations' if y.startswith('val_') else 'steps'}" if smooth > 1 else ""
        finish(ax, axis_label(x), axis_label(y) + smoothed, handles, grow=fresh)
    return ax


def _draw(ax: Axes, arm: Arm, top: float) -> Line2D:
    """Draw one arm and return its entry in the legend; crosses are no higher than ``top``."""
    runs = {name: run.set_index("step") for name, run in arm.frame.groupby("config_hash")}
    wide = pd.DataFrame({name: run["_y"] for name, run in runs.items()})
    place = pd.DataFrame({name: run["_x"] for name, run in runs.items()}).mean(axis=1)
    fine = [name for name, run in runs.items() if not run["_lost"].any()]
    shared = wide[fine].dropna()
    look: dict[str, Any] = {"color": arm.color, "ls": arm.dash}
    mark: dict[str, Any] = (
        {"marker": arm.marker, "ms": 3} if len(wide.dropna(how="all")) <= 25 else {}
    )  # few enough to show each
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
    some = f" ({len(fine)} of {len(runs)} seeds)" if len(fine) < len(runs) and len(runs) > 1 else ""
    return entry(arm.label + some, **look, **mark)


def _first(frame: pd.DataFrame) -> pd.Series:
    """Return each run's first finite loss: the scale of the figure where all runs diverged."""
    return frame.groupby("config_hash")["_y"].first()
