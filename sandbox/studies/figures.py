"""The figures of the studies. Notebooks and ``make figures`` call the same functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from torch import nn

from ..config import MuonConfig
from ..plots import PAGE, panels, plot_groups, plot_loss, plot_lr_sweep, plot_shares
from ..records.comparison import best, compare
from ..records.record import RunRecord
from ..records.report import save_figure
from ..records.tables import curves, table
from .models import group_tables
from .presets import Study, compared


def rate_figure(study: Study, records: Sequence[RunRecord]) -> Axes:
    """Draw and save a rate sweep under the study's name: validation loss against its rate."""
    data = table(records)
    ax = plot_lr_sweep(data, x=study.x, by=compared(data))
    save_figure(ax.figure, study.name, records=records, data=data)
    return ax


def grouping_table(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return the table of ``studies.grouping`` with its arms in words: the column ``groups`` instead of the policy."""
    data = table(records)
    by_role = data["optimizer.policy.overrides"] == "[]"
    data = data[["config_hash", "status", "val_loss", "val_bpb", "optimizer.lr", "seed"]]
    return data.assign(groups=by_role.map({True: "by role", False: "ndim == 2"}))


def grouping_figure(study: Study, records: Sequence[RunRecord]) -> Axes:
    """Draw and save what the wrong groups cost: validation loss against the base rate, right and wrong."""
    data = grouping_table(records)
    ax = plot_lr_sweep(data, x=study.x, by="groups")
    save_figure(ax.figure, study.name, records=records, data=data)
    return ax


def grouping_cost(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return the wrong groups against the right ones, each at its best base rate: nats/token, paired by seed."""
    data = grouping_table(records)
    chosen = data.merge(best(data, by="groups")[["groups", "optimizer.lr"]])
    return compare(chosen, baseline={"groups": "by role"})


def curves_figure(study: Study, records: Sequence[RunRecord]) -> Axes:
    """Draw and save loss curves under the study's name: mean and band over seeds for each optimizer."""
    data = curves(records)
    ax = plot_loss(data, by=compared(data), smooth=5)
    save_figure(ax.figure, study.name, records=records, data=data)
    return ax


def groups_figure(models: Mapping[Any, nn.Module], optimizer: MuonConfig, name: str, *, label: str = "model") -> Axes:
    """Draw and save each role's share of the elements of each model; ``label`` is the column that names the models."""
    data = group_tables(models, optimizer, label=label)
    ax = plot_groups(data, by=label)
    save_figure(ax.figure, name, data=data)
    return ax


def shares_figure(models: Mapping[int, nn.Module], optimizer: MuonConfig, name: str) -> Axes:
    """Draw and save how the share of each role changes with the models' width."""
    data = group_tables(models, optimizer, label="model.width")
    ax = plot_shares(data, x="model.width")
    save_figure(ax.figure, name, data=data)
    return ax


def overview_figure(
    study: Study, records: Sequence[RunRecord], models: Mapping[int, nn.Module], optimizer: MuonConfig
) -> Any:
    """Draw and save the README's picture: a rate sweep and, beside it, each role's share of the elements by width.

    The CSV holds the sweep; the shares are those of ``groups_figure``, which has a CSV of its own.

    Returns:
        The two Axes, as an array of shape (2,).
    """
    data, sizes = table(records), group_tables(models, optimizer, label="model.width")
    figure, axes = panels(1, 2, width=PAGE, height=2.6)
    plot_lr_sweep(data, axes[0], x=study.x, by=compared(data))
    plot_groups(sizes, axes[1], by="model.width")
    save_figure(figure, "overview", records=records, data=data)
    return axes


def findings(study: Study, records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return each scalar optimizer's best rate, whether it lies inside the grid, and its mean loss in nats/token."""
    data = table(records)
    rows = best(data, by=compared(data))
    widths = {"width": rows["model.width"]} if "model.width" in rows else {}
    return pd.DataFrame(
        {
            "study": study.name,
            **widths,
            "scalar_opt": rows["optimizer.scalar_opt"],
            "rate": study.x.removeprefix("optimizer."),
            "best": rows[study.x],
            "inside": rows[study.x].between(data[study.x].min(), data[study.x].max(), inclusive="neither"),
            "val_loss": rows["mean"],
            "standard_error": rows["standard_error"],
            "n": rows["n"],
        }
    )


def against_best(study: Study, records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return what the neighbours of each best rate cost: ``rate`` minus ``best`` in nats/token, paired by seed."""
    data = table(records)
    rates, names = sorted(data[study.x].unique()), compared(data)
    tables = []
    for row in best(data, by=names).to_dict("records"):
        place = rates.index(row[study.x])
        arms = data.merge(pd.DataFrame([{name: row[name] for name in names}]))
        near = arms[arms[study.x].isin(rates[max(place - 1, 0) : place + 2])]
        cost = compare(near, baseline={study.x: row[study.x]}).rename(columns={study.x: "rate"})
        told = {name.rpartition(".")[2]: row[name] for name in names} | {"best": row[study.x]}
        tables.append(cost[["rate", "difference", "standard_error", "n"]].assign(study=study.name, **told))
    result = pd.concat(tables, ignore_index=True)
    return result[["study", *told, "rate", "difference", "standard_error", "n"]]


def verdict(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return Lion against AdamW, each at its best rate: mean difference in nats/token, paired by seed, by width."""
    data = table(records)
    parts = [rows for _, rows in data.groupby("model.width")] if "model.width" in data else [data]
    return pd.concat([compare(part, baseline={"optimizer.scalar_opt": "adamw"}) for part in parts], ignore_index=True)
