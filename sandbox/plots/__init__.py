"""The figures: a table in, matplotlib ``Axes`` out. They read no file and train nothing.

Figures are drawn for one column of a paper (3.4 in, 7 pt) in the eight colours of Okabe and Ito, which people with
any kind of colour vision can tell apart (https://jfly.uni-koeln.de/color/). A role and an arm keep one colour and one
marker in all figures. ``matplotlib.rcParams`` is left as it was: all settings live in ``style()``.
"""

from .canvas import COLUMN, PAGE, panels, style
from .groups import plot_groups, plot_shares
from .loss import plot_loss
from .sweep import plot_lr_sweep

__all__ = ["COLUMN", "PAGE", "panels", "plot_groups", "plot_loss", "plot_lr_sweep", "plot_shares", "style"]
