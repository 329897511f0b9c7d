"""A figure's size and style, its labels, and the legend below it."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

COLUMN, PAGE = 3.4, 7.0  # inches: one column, and both, of a two-column paper

STYLE: Any = {  # of matplotlib.rcParams
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is the same on every machine
    "font.size": 7.0,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.0,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.0,
    "legend.handlelength": 2.5,
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
}


def style() -> contextlib.AbstractContextManager[None]:
    """Return a context in which matplotlib draws in this module's style; afterwards its settings are as before."""
    _notebook_pyplot()
    return matplotlib.rc_context(STYLE)


def panels(
    rows: int = 1, columns: int = 1, *, width: float = COLUMN, height: float | None = None
) -> tuple[Figure, Any]:
    """Return ``(figure, axes)`` in this module's style; ``axes`` is one Axes, or an array of them.

    Under IPython the figure belongs to pyplot, so a notebook shows it once, at the end of its cell, and closes it.
    Elsewhere pyplot does not know it, and it is freed like any object: a loop leaks nothing.

    Args:
        rows: panels from top to bottom.
        columns: panels from left to right.
        width: inches; ``COLUMN`` or ``PAGE``.
        height: inches; None is 2.1 a row.
    """
    pyplot = _notebook_pyplot()
    with style():
        make = pyplot.figure if pyplot else Figure
        figure = make(figsize=(width, height or 2.1 * rows), layout="constrained")
        return figure, figure.subplots(rows, columns)


def _notebook_pyplot() -> Any:
    """Return pyplot with its backend loaded under IPython, else None, since nothing would show its figures.

    Loading the notebook's backend switches matplotlib to interactive, and that makes a cell show its figures. Inside a
    style's context the switch would be undone at the end, and no later cell would show a figure. So it comes first.
    """
    if not getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)():
        return None
    import matplotlib.pyplot as plt  # not above: outside notebooks nothing needs a backend

    if not plt.get_fignums():
        plt.switch_backend(matplotlib.get_backend())
    return plt


def finish(ax: Axes, x: str, y: str, handles: list[Any], *, grow: bool) -> None:
    """Label the axes and put the legend below them, where it hides nothing, in as many columns as fit.

    Without a layout engine (plain ``plt.subplots()``) there is no room below, and the legend goes inside.

    Args:
        ax: with everything drawn; this comes last, since it reads where the axes are in the figure.
        x: label of the x axis.
        y: label of the y axis.
        handles: the legend's entries.
        grow: whether the figure was made here and may become taller by the legend.
    """
    ax.set_xlabel(x, size=STYLE["axes.labelsize"])
    ax.set_ylabel(y, size=STYLE["axes.labelsize"])
    ax.tick_params(which="both", labelsize=STYLE["xtick.labelsize"], width=0.6, length=2.5)  # also of ticks made later
    ax.tick_params(which="minor", length=1.5)
    figure = ax.figure.figure  # the whole figure, if the axes are in a subfigure
    if figure.get_layout_engine() is None:
        ax.legend(handles=handles, loc="best", borderaxespad=0.5, frameon=True, framealpha=0.8)
        return
    figure.draw_without_rendering()
    if ax.xaxis.label.get_window_extent().width > ax.get_window_extent().width:  # it would run into the next panel's
        ax.set_xlabel(x.replace(", ", ",\n", 1))
        figure.draw_without_rendering()
    inner, inch = ax.get_window_extent(), figure.dpi
    outer = ax.get_tightbbox() or inner
    corner = ScaledTranslation(
        (outer.x0 - inner.x0) / inch, (outer.y0 - inner.y0) / inch - 0.06, figure.dpi_scale_trans
    )
    at: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": ax.transAxes + corner}
    for columns in range(min(4, len(handles)), 0, -1):
        legend = ax.legend(handles=handles, ncols=columns, **at)
        if legend.get_window_extent().width <= inner.x1 - outer.x0:
            break
    if grow:
        figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / inch)


def entry(label: str, **look: Any) -> Line2D:
    """Return an entry of a legend that looks like a line drawn with ``look``; by default a grey marker."""
    return Line2D([], [], label=label, **{"ls": "", "color": "0.3"} | look)


def axis_label(column: str) -> str:
    """Return the label of an axis for this column, with its unit if that is known."""
    name = column.rsplit(".", 1)[-1]
    return LABELS.get(column) or (f"{name} (per step)" if name.endswith("lr") else name)
