"""The figures say what the tables say, are legible at column width, and leave matplotlib as it was."""

import gc
import itertools
import math
import subprocess
import sys
import weakref

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from sandbox.plots import COLUMN, PAGE, panels, plot_groups, plot_loss, plot_lr_sweep, plot_shares, style
from sandbox.plots.arms import NAMES, OTHERS, ROLES, arms, varying
from sandbox.plots.tables import short, words

HEAD, OPT = "optimizer.lm_head_lr", "optimizer.scalar_opt"
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SMALLEST_TYPE = 6.0  # pt


def run(rate, loss, *, opt="adamw", seed=0, status="finished", **more):
    name = f"{opt}-{rate}-{seed}-{sorted(more.items())}"
    return {"config_hash": name, "status": status, "val_loss": loss, "seed": seed, HEAD: rate, OPT: opt} | more


def sweep_table(seeds=(0, 1), best={"adamw": 1e-2, "lion": 3e-3}, rates=RATES):  # noqa: B006
    """A U in the logarithm of the rate, with a little noise by seed."""
    return pd.DataFrame(
        [
            run(rate, 3 + math.log10(rate / at) ** 2 + 0.01 * seed, opt=opt, seed=seed)
            for opt, at in best.items()
            for rate in rates
            for seed in seeds
        ]
    )


def curve(name, losses, *, status="finished", seed=0, **more):
    steps = np.arange(1, len(losses) + 1)
    columns = {"config_hash": name, "status": status, "step": steps, "tokens": steps * 2048, "train_loss": losses}
    return pd.DataFrame(columns | {"seed": seed} | more)


def group_rows(sizes, **more):
    total = sum(sizes.values())
    return [
        {
            "role": role,
            "algorithm": "muon" if role == "matrix" else "adamw",
            "elements": n,
            "share": n / total,
            "lr": 0.01,
        }
        | more
        for role, n in sizes.items()
    ]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def lines(ax, marker=None, color=None):
    """The lines that hold data, of a marker and a colour where given."""
    return [
        line
        for line in ax.lines
        if len(line.get_xdata())
        and (marker is None or line.get_marker() == marker)
        and (color is None or line.get_color() == color)
    ]


def means(ax, opt):
    """The mean line of an optimizer's arm, as rate -> loss."""
    (line,) = [line for line in lines(ax, "None", NAMES[opt][1]) if line.get_linestyle() != "None"]
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


# Sweeps of a rate


def test_the_line_is_the_mean_over_seeds():
    table = sweep_table()
    drawn = means(plot_lr_sweep(table, x=HEAD), "adamw")
    expected = table[table[OPT] == "adamw"].groupby(HEAD)["val_loss"].mean()
    assert drawn == pytest.approx(expected.to_dict())


def test_every_seed_has_its_point():
    table = sweep_table(seeds=(0, 1, 2))
    points = [line for line in lines(plot_lr_sweep(table, x=HEAD)) if line.get_alpha()]
    assert sorted(y for line in points for y in line.get_ydata()) == sorted(table["val_loss"])


def test_the_star_is_at_the_lowest_mean_and_the_legend_gives_its_rate():
    ax = plot_lr_sweep(sweep_table(), x=HEAD)
    assert {float(line.get_xdata()[0]) for line in lines(ax, "*")} == {1e-2, 3e-3}
    assert {"AdamW: best 0.01", "Lion: best 0.003", "lowest mean of 2 seeds"} <= set(legend(ax))


@pytest.mark.parametrize("at", [RATES[0], RATES[-1]])
def test_an_optimum_at_the_border_of_the_grid_is_said_to_be_there(at):
    ax = plot_lr_sweep(sweep_table(best={"adamw": at}), x=HEAD)
    assert legend(ax)[0] == f"all runs: best {short(at)} (border of its grid)"


def test_a_higher_rate_that_diverged_brackets_the_optimum():
    table = sweep_table(best={"adamw": 1e-2})
    table.loc[table[HEAD] == RATES[-1], ["status", "val_loss"]] = ["diverged", math.nan]
    assert legend(plot_lr_sweep(table, x=HEAD))[0] == "all runs: best 0.01"


def test_a_diverged_run_is_a_cross_at_the_top_and_is_counted():
    table = sweep_table()
    table.loc[(table[OPT] == "lion") & (table[HEAD] == 3e-2), ["status", "val_loss"]] = ["diverged", math.nan]
    ax = plot_lr_sweep(table, x=HEAD)
    (cross,) = lines(ax, "x")
    assert cross.get_color() == NAMES["lion"][1]
    assert set(cross.get_xdata()) == {3e-2}
    heights = ax.transAxes.inverted().transform(cross.get_transform().transform(cross.get_xydata()))[:, 1]
    assert (heights > 0.9).all()
    assert "diverged (2 runs)" in legend(ax)


def test_crosses_lie_above_all_losses():
    extra = {"model.width": [64, 128, 256, 512]}
    table = pd.concat([sweep_table().assign(**{"model.width": w}) for w in extra["model.width"]], ignore_index=True)
    table["config_hash"] = table.index.astype(str)
    table.loc[table[HEAD] == 3e-2, ["status", "val_loss"]] = ["diverged", math.nan]
    ax = plot_lr_sweep(table, x=HEAD)
    lowest_cross = min(line.get_ydata()[0] for line in lines(ax, "x"))
    highest_loss = ax.transAxes.inverted().transform(ax.transData.transform((1e-2, table["val_loss"].max())))[1]
    assert highest_loss < lowest_cross


def test_a_rate_at_which_one_seed_diverged_has_no_mean():
    table = sweep_table(best={"adamw": 3e-2, "lion": 3e-3})
    table.loc[(table[OPT] == "adamw") & (table[HEAD] == 3e-2) & (table["seed"] == 1), "status"] = "diverged"
    ax = plot_lr_sweep(table, x=HEAD)
    assert math.isnan(means(ax, "adamw")[3e-2])
    assert legend(ax)[0] == "AdamW: best 0.01"


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_runs_without_a_result_are_counted_and_void_the_mean(status):
    table = sweep_table(best={"adamw": 1e-2, "lion": 3e-3})
    table.loc[0, ["status", "val_loss"]] = [status, math.nan]
    ax = plot_lr_sweep(table, x=HEAD)
    assert "not shown: 1 run without a result" in legend(ax)
    assert math.isnan(means(ax, "adamw")[1e-3])


def test_a_run_that_stands_in_the_table_twice_counts_once():
    table = sweep_table()
    twice = pd.concat([table, table[(table["seed"] == 0)]])
    assert means(plot_lr_sweep(twice, x=HEAD), "lion") == means(plot_lr_sweep(table, x=HEAD), "lion")


def test_a_rate_of_zero_has_its_own_tick_below_the_others():
    table = pd.concat([sweep_table(), pd.DataFrame([run(0.0, 3.9), run(0.0, 3.95, opt="lion")])])
    ax = plot_lr_sweep(table, x=HEAD)
    ax.figure.draw_without_rendering()
    names = {t.get_text(): t.get_position()[0] for t in ax.get_xticklabels()}
    assert names["0"] == pytest.approx(RATES[0] / 3, rel=0.2)
    assert ax.get_xlim()[0] < names["0"]
    assert 0 not in means(ax, "adamw")
    assert names["0"] not in means(ax, "adamw")


def test_a_sweep_of_zero_alone_is_drawn():
    ax = plot_lr_sweep(pd.DataFrame([run(0.0, 3.9)]), x=HEAD)
    assert legend(ax)[0] == "all runs: best 0"


def test_zero_can_be_the_best_rate_and_is_no_border():
    ax = plot_lr_sweep(pd.concat([pd.DataFrame([run(0.0, 1.0)]), sweep_table(best={"adamw": 1e-2})]), x=HEAD)
    assert legend(ax)[0] == "all runs: best 0"


def test_ticks_name_powers_of_ten_or_the_rates_tried():
    wide = plot_lr_sweep(sweep_table(rates=(1e-4, 1e-3, 1e-2, 1e-1)), x=HEAD)
    narrow = plot_lr_sweep(sweep_table(rates=(1e-3, 2e-3, 4e-3, 8e-3)), x=HEAD)
    for ax in (wide, narrow):
        ax.figure.draw_without_rendering()
    assert [t.get_text() for t in wide.get_xticklabels()] == ["1e-4", "0.001", "0.01", "0.1"]
    assert [t.get_text() for t in narrow.get_xticklabels()] == ["0.001", "0.002", "0.004", "0.008"]


def test_an_optimizer_has_the_same_colour_whoever_else_is_there():
    both, one = (plot_lr_sweep(t, x=HEAD, by=OPT) for t in (sweep_table(), sweep_table(best={"lion": 3e-3})))
    assert lines(both, "*")[1].get_markerfacecolor() == lines(one, "*")[0].get_markerfacecolor() == NAMES["lion"][1]


@pytest.mark.parametrize(
    ("table", "options", "said"),
    [
        (sweep_table(), {"x": "optimizer.lmhead_lr"}, "did you mean 'optimizer.lm_head_lr'"),
        (sweep_table(), {"x": HEAD, "by": "optimizer.scalar"}, "did you mean 'optimizer.scalar_opt'"),
        (sweep_table(), {"x": HEAD, "y": "loss"}, "did you mean 'val_loss'"),
        (sweep_table(), {"x": OPT}, "does not hold numbers only"),
        (sweep_table(rates=(1e-3,)).assign(**{HEAD: -1e-3}), {"x": HEAD}, "-0.001 was given"),
        (sweep_table().assign(status="failed"), {"x": HEAD}, "no run of 16 finished or diverged"),
        (sweep_table()[:0], {"x": HEAD}, "no run of 0"),
    ],
)
def test_a_sweep_that_cannot_be_drawn_says_why(table, options, said):
    with pytest.raises(ValueError, match=said):
        plot_lr_sweep(table, **options)


def test_a_sweep_in_which_all_runs_diverged_is_drawn():
    ax = plot_lr_sweep(sweep_table().assign(status="diverged", val_loss=math.nan), x=HEAD)
    assert legend(ax) == ["AdamW", "Lion", "diverged (16 runs)"]


# Arms


def test_seeds_never_make_an_arm():
    table = pd.DataFrame([run(r, 3.0, seed=s, data_seed=s) for r in RATES for s in (0, 1)])
    assert varying(table, HEAD) == []


def test_a_column_that_another_determines_makes_no_arm_of_its_own():
    table = pd.DataFrame([run(r, 3.0, **{"model.width": w, "model.heads": w // 32}) for r in RATES for w in (64, 128)])
    assert varying(table, HEAD) == ["model.width"]


def test_a_rate_that_moves_with_x_makes_no_arm():
    table = pd.DataFrame(
        [run(r, 3.0, opt=o, **{"optimizer.embed_lr": 3 * r}) for r in RATES for o in ("adamw", "lion")]
    )
    assert varying(table, HEAD) == [OPT]


def test_arms_with_grids_of_their_own_stay_apart():
    table = pd.DataFrame([run(1e-3, 3.0), run(1e-2, 3.1), run(1e-4, 3.0, opt="lion"), run(3e-4, 3.1, opt="lion")])
    assert [arm.label for arm in arms(table, None, HEAD)] == ["AdamW", "Lion"]


def test_a_second_column_is_told_by_dashes_under_the_first_columns_colours():
    table = pd.DataFrame([run(r, 3.0, opt=o, **{"model.width": w}) for r in RATES for o in NAMES for w in (64, 128)])
    found = arms(table, None, HEAD)
    assert found[0].label == "AdamW, width 64"
    assert {(a.color, a.dash) for a in found} == {(look[1], d) for look in NAMES.values() for d in ("-", found[1].dash)}


def test_fifty_arms_come_in_order_and_the_first_28_look_different():
    table = pd.DataFrame([run(1e-3, 3.0, **{"optimizer.mu": m / 50}) for m in range(50)])
    found = arms(table, "optimizer.mu")
    assert [a.label for a in found][:2] == ["mu 0", "mu 0.02"]
    assert len({(a.color, str(a.dash)) for a in found[:28]}) == 28


def test_a_missing_value_is_an_arm_called_default():
    table = pd.DataFrame([run(1e-3, 3.0, **{"optimizer.embed_lr": v}) for v in (0.1, None)])
    assert [a.label for a in arms(table, "optimizer.embed_lr")] == ["embed_lr 0.1", "embed_lr default"]


def test_a_config_class_and_an_algorithm_share_their_look():
    table = pd.DataFrame(
        [run(1e-3, 3.0, **{"optimizer.kind": k}) for k in ("MuonConfig", "AdamWConfig", "Dion2Config")]
    )
    assert [(a.label, a.color) for a in arms(table, "optimizer.kind")] == [
        NAMES[n][:2] for n in ("adamw", "muon", "dion2")
    ]


# Losses in time


def two_seeds(**more):
    return pd.concat(
        [curve("a", [4.0, 3.0, 2.0], **more), curve("b", [5.0, 4.0, 3.0], seed=1, **more)], ignore_index=True
    )


def test_the_curve_is_the_mean_and_the_band_goes_from_the_lowest_to_the_highest_seed():
    ax = plot_loss(two_seeds())
    assert list(ax.lines[0].get_ydata()) == [4.5, 3.5, 2.5]
    (band,) = [c for c in ax.collections if isinstance(c, PolyCollection)]
    corners = {tuple(map(float, point)) for point in band.get_paths()[0].vertices}
    assert corners == {(1, 4), (2, 3), (3, 2), (1, 5), (2, 4), (3, 3)}
    assert legend(ax) == ["all runs", "band: lowest to highest of 2 seeds"]


def test_one_seed_has_no_band():
    ax = plot_loss(curve("a", [4.0, 3.0]))
    assert not ax.collections
    assert legend(ax) == ["all runs"]


def test_a_diverged_run_is_marked_at_its_last_loss_and_left_out_of_the_mean():
    curves = pd.concat([two_seeds(), curve("c", [4.5, 4.8, math.inf], status="diverged", seed=2)], ignore_index=True)
    ax = plot_loss(curves)
    assert list(ax.lines[0].get_ydata()) == [4.5, 3.5, 2.5]
    (cross,) = lines(ax, "x")
    assert cross.get_xydata().tolist() == [[2, 4.8]]
    assert {"all runs (2 of 3 seeds)", "diverged (1 run)"} <= set(legend(ax))


def test_an_explosion_does_not_squeeze_the_other_curves():
    curves = pd.concat([two_seeds(), curve("c", [4.5, 60.0, 1e5], status="diverged", seed=2)], ignore_index=True)
    ax = plot_loss(curves)
    assert ax.get_ylim()[1] < 5.5
    assert lines(ax, "x")[0].get_ydata()[0] == 5.0


def test_without_a_status_a_loss_that_is_not_finite_means_diverged():
    curves = pd.concat([two_seeds(), curve("c", [4.5, 4.8, math.nan], seed=2)], ignore_index=True)
    assert "diverged (1 run)" in legend(plot_loss(curves.drop(columns="status")))


def test_where_all_runs_diverged_the_first_losses_set_the_scale():
    ax = plot_loss(curve("a", [7.0, 6.0, 900.0], status="diverged"))
    assert ax.get_ylim()[1] < 8
    assert "diverged (1 run)" in legend(ax)


def test_a_run_that_ended_early_shortens_the_mean_and_the_other_goes_on_alone():
    curves = pd.concat([curve("a", [4.0, 3.0, 2.0, 1.0]), curve("b", [5.0, 4.0], status="interrupted", seed=1)])
    ax = plot_loss(curves)
    assert list(ax.lines[0].get_ydata()) == [4.5, 3.5]
    assert [3.0, 2.0, 1.0] in [list(line.get_ydata()) for line in ax.lines]


def test_validation_losses_are_drawn_where_they_were_evaluated():
    curves = two_seeds().assign(val_loss=[math.nan, 3.1, 2.1, math.nan, 3.3, 2.5])
    line = plot_loss(curves, y="val_loss").lines[0]
    assert line.get_xydata() == pytest.approx(np.array([[2, 3.2], [3, 2.3]]))


def test_seconds_are_averaged_step_by_step():
    curves = two_seeds().assign(seconds=[1.0, 2.0, 3.0, 3.0, 4.0, 5.0])
    ax = plot_loss(curves, x="seconds")
    assert list(ax.lines[0].get_xdata()) == [2.0, 3.0, 4.0]
    assert ax.get_xlabel() == "training time (s)"


def test_smoothing_is_a_running_mean_of_each_run_and_the_label_states_it():
    ax = plot_loss(curve("a", [4.0, 1.0, 1.0, 1.0]), smooth=3)
    assert list(ax.lines[0].get_ydata()) == [2.5, 2.0, 1.0, 1.0]
    assert ax.get_ylabel() == "training loss (nats/token)\nmean of 3 steps"


def test_a_constant_loss_is_drawn():
    low, high = plot_loss(curve("a", [2.0, 2.0])).get_ylim()
    assert low < 2.0 < high


@pytest.mark.parametrize(
    ("curves", "options", "said"),
    [
        (two_seeds(), {"y": "val_los"}, "no column 'val_los'"),
        (two_seeds(), {"x": "seconds"}, "no column 'seconds'"),
        (two_seeds(), {"smooth": 0}, "smooth=0 was given"),
        (two_seeds().assign(train_loss=math.nan), {}, "no finite 'train_loss'"),
        (two_seeds()[:0], {}, "no finite"),
    ],
)
def test_curves_that_cannot_be_drawn_say_why(curves, options, said):
    with pytest.raises(ValueError, match=said):
        plot_loss(curves, **options)


# Groups

SMALL = {"matrix": 60, "vector": 1, "embed": 20, "lm_head": 20}
LARGE = {"matrix": 12_300_000, "vector": 700, "embed": 500_000}


def test_bars_add_up_to_all_elements():
    ax = plot_groups(pd.DataFrame(group_rows(SMALL, model="small") + group_rows(LARGE, model="large")))
    ends = {}
    for bar in ax.patches:
        ends[round(bar.get_y(), 3)] = max(ends.get(round(bar.get_y(), 3), 0), bar.get_x() + bar.get_width())
    assert list(ends.values()) == pytest.approx([100, 100])


def test_a_bar_carries_its_elements_in_words_and_the_legend_rate_and_algorithm():
    ax = plot_groups(pd.DataFrame(group_rows(LARGE, model="large")))
    assert "12.3 M" in [t.get_text() for t in ax.texts]
    assert "matrix: Muon, lr 0.01" in legend(ax)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["large\n12.8 M"]


def test_text_that_does_not_fit_its_bar_is_left_out():
    ax = plot_groups(pd.DataFrame(group_rows(LARGE)))
    assert [t.get_text() for t in ax.texts] == ["12.3 M"]


def test_rates_that_differ_are_a_range_in_the_legend_and_stand_in_their_bars():
    halves = {"matrix": 50, "embed": 50}
    rows = group_rows(halves, model="a") + [r | {"lr": 3e-4} for r in group_rows(halves, model="b")]
    ax = plot_groups(pd.DataFrame(rows))
    assert "matrix: Muon, lr 3e-4 to 0.01" in legend(ax)
    assert {"50\nlr 0.01", "50\nlr 3e-4"} == {t.get_text() for t in ax.texts}


def test_the_varying_config_column_names_the_bars():
    rows = group_rows(SMALL, **{"model.width": 64}) + group_rows(LARGE, **{"model.width": 32})
    ax = plot_groups(pd.DataFrame(rows))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["width 32\n12.8 M", "width 64\n101"]


def test_the_seeds_of_a_model_make_one_bar():
    rows = group_rows(SMALL, model="m", config_hash="a") + group_rows(SMALL, model="m", config_hash="b")
    assert [t.get_text() for t in plot_groups(pd.DataFrame(rows)).get_yticklabels()] == ["m\n101"]


def test_rows_as_a_record_holds_them_are_a_table_too():
    assert len(plot_groups(group_rows(SMALL)).patches) == 4


def test_shares_are_percent_of_each_models_elements():
    rows = group_rows(SMALL, **{"model.width": 64}) + group_rows({"matrix": 75, "embed": 25}, **{"model.width": 128})
    ax = plot_shares(pd.DataFrame(rows))
    drawn = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    assert drawn["matrix"] == [[64, pytest.approx(6000 / 101)], [128, 75]]
    assert drawn["lm_head"][1] == [128, 0]


def test_equal_shares_of_embedding_and_head_are_both_seen():
    rows = [row for w in (64, 128) for row in group_rows(SMALL, **{"model.width": w})]
    look = {line.get_label(): line for line in plot_shares(pd.DataFrame(rows)).lines}
    assert look["embed"].get_linewidth() > look["lm_head"].get_linewidth()
    assert look["lm_head"].get_zorder() >= look["embed"].get_zorder()
    assert look["lm_head"].is_dashed()


@pytest.mark.parametrize(
    ("draw", "rows", "options", "said"),
    [
        (plot_groups, group_rows({"matrx": 1}), {}, "role 'matrx' was given: did you mean 'matrix'"),
        (plot_groups, group_rows(SMALL), {"by": "model"}, "no column 'model'"),
        (plot_groups, [{"role": "matrix"}], {}, "no column 'elements'"),
        (plot_shares, group_rows(SMALL, **{"model.widht": 64}), {}, "did you mean 'model.widht'"),
        (plot_shares, group_rows(SMALL, **{"model.width": 0}), {}, "above 0"),
        (plot_shares, group_rows(SMALL, **{"model.width": "wide"}), {}, "numbers only"),
        (
            plot_shares,
            group_rows(SMALL, config_hash="a", **{"model.width": 64})
            + group_rows(LARGE, config_hash="b", **{"model.width": 64}),
            {},
            "models of different sizes",
        ),
    ],
)
def test_groups_that_cannot_be_drawn_say_why(draw, rows, options, said):
    with pytest.raises(ValueError, match=said):
        draw(pd.DataFrame(rows), **options)


# All of them


def sweep_with_everything():
    table = sweep_table(seeds=(0, 1, 2), best={"adamw": 1e-2, "lion": 1e-3})
    table.loc[(table[OPT] == "lion") & (table[HEAD] == 3e-2), ["status", "val_loss"]] = ["diverged", math.nan]
    table.loc[0, "status"] = "failed"
    return table


FIGURES = {
    "sweep": lambda ax=None: plot_lr_sweep(sweep_with_everything(), ax, x=HEAD),
    "loss": lambda ax=None: plot_loss(two_seeds(**{"optimizer.kind": "MuonConfig"}), ax, by="optimizer.kind", smooth=2),
    "groups": lambda ax=None: plot_groups(group_rows(SMALL, model="GPT") + group_rows(LARGE, model="GPT-2 small"), ax),
    "shares": lambda ax=None: plot_shares([r for w in (64, 128) for r in group_rows(SMALL, **{"model.width": w})], ax),
}


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_a_figure_is_one_column_wide_in_type_that_can_be_read_and_nothing_is_cut_off(draw):
    ax = draw()
    figure = ax.figure
    figure.draw_without_rendering()
    assert figure.get_figwidth() == COLUMN
    assert figure.get_figheight() < 3.5
    texts = [ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels(), *ax.get_yticklabels(), *ax.texts]
    assert min(t.get_fontsize() for t in [*texts, *ax.get_legend().get_texts()]) >= SMALLEST_TYPE
    inside, page = ax.get_tightbbox(), figure.bbox
    assert inside.x0 >= page.x0
    assert inside.y0 >= page.y0
    assert inside.x1 <= page.x1
    assert inside.y1 <= page.y1


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_the_legend_hides_no_data(draw):
    ax = draw()
    ax.figure.draw_without_rendering()
    assert not ax.get_legend().get_window_extent().overlaps(ax.get_window_extent())
    assert not ax.get_legend().get_window_extent().overlaps(ax.xaxis.label.get_window_extent())


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_every_axis_has_its_unit(draw):
    ax = draw()
    for label in (ax.get_xlabel(), ax.get_ylabel()):
        assert "(" in label


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_given_axes_are_drawn_on_and_returned(draw):
    figure, axes = panels(1, 2, width=PAGE)
    assert draw(axes[1]) is axes[1]
    assert not axes[0].lines
    assert figure.get_figwidth() == PAGE
    part = Figure(figsize=(7, 3), layout="constrained").subfigures(1, 2)[0].subplots()
    assert draw(part) is part


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_axes_of_a_figure_that_makes_no_room_hold_their_legend_inside(draw):
    ax = draw(Figure(figsize=(6, 4)).subplots())
    ax.figure.draw_without_rendering()
    inside, legend = ax.get_window_extent(), ax.get_legend().get_window_extent()
    assert inside.contains(legend.x0, legend.y0)
    assert inside.contains(legend.x1, legend.y1)
    assert ax.xaxis.label.get_fontsize() == 7


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_drawing_changes_neither_the_table_nor_matplotlibs_settings(draw):
    before = dict(matplotlib.rcParams)
    draw()
    assert dict(matplotlib.rcParams) == before
    table = sweep_table()
    copy = table.copy()
    plot_lr_sweep(table, x=HEAD)
    pd.testing.assert_frame_equal(table, copy)


def test_a_style_ends_with_its_context():
    before = dict(matplotlib.rcParams)
    with style():
        assert matplotlib.rcParams["font.size"] == 7
    assert dict(matplotlib.rcParams) == before


def test_figures_in_a_loop_leave_nothing_behind():
    figures = [weakref.ref(plot_loss(two_seeds()).figure) for _ in range(25)]
    gc.collect()
    assert [f() for f in figures] == [None] * 25


def test_the_rates_of_a_wide_grid_do_not_overlap():
    runs = pd.DataFrame({"status": "finished", "lr": [1e-3, 1e-1, 1e6], "val_loss": [2.0, 1.0, 3.0]})
    ax = plot_lr_sweep(runs, x="lr")
    ax.figure.canvas.draw()
    boxes = [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]
    assert len(boxes) > 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_a_notebook_shows_each_figure_once_and_closes_it():
    code = """
from IPython.core.interactiveshell import InteractiveShell
import matplotlib, pandas as pd, sys
matplotlib.use("module://matplotlib_inline.backend_inline")
shell = InteractiveShell.instance()
import matplotlib_inline.backend_inline as inline
shown = []
inline.display = lambda figure, **_: shown.append(figure)
from sandbox.plots import plot_loss, style
import matplotlib.pyplot as plt
curve = pd.DataFrame({"config_hash": "a", "step": [1, 2], "train_loss": [3.0, 2.0]})
counts = []
for _ in range(2):  # two cells
    ax = plot_loss(curve)
    inline.flush_figures()
    counts.append((len(shown), plt.get_fignums()))
    assert shown[-1] is ax.figure
assert counts == [(1, []), (2, [])], counts
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_colours_of_roles_and_of_optimizers_differ_for_any_kind_of_colour_vision():
    # Machado, Oliveira & Fernandes 2009, https://doi.org/10.1109/TVCG.2009.113, severity 1.0, on linear RGB
    kinds = {
        "protanopia": [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ],
        "deuteranopia": [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ],
    }
    for looks in ([r[0] for r in ROLES.values()], [n[1] for n in NAMES.values()], [o[0] for o in OTHERS]):
        seen = np.array([to_rgb(c) for c in looks]) ** 2.2
        for matrix in kinds.values():
            dim = np.clip(seen @ np.array(matrix).T, 0, 1) ** (1 / 2.2)
            gaps = [np.abs(a - b).max() for i, a in enumerate(dim) for b in dim[:i]]
            assert min(gaps) > 0.1
    assert len({marker for _, marker in OTHERS}) == len(OTHERS)


@pytest.mark.parametrize(
    ("number", "said"),
    [(950, "950"), (12_345, "12.3 k"), (12.3e6, "12.3 M"), (999_999, "1 M"), (671e9, "671 B"), (2e12, "2 T"), (0, "0")],
)
def test_counts_are_said_in_words(number, said):
    assert words(number) == said


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0.0, "0"),
        (3e-4, "3e-4"),
        (3.16e-4, "3.2e-4"),
        (1e-12, "1e-12"),
        (0.0316, "0.032"),
        (1.5, "1.5"),
        (1024.0, "1024"),
    ],
)
def test_rates_are_said_in_two_digits(number, said):
    assert short(number) == said


def test_the_labels_of_narrow_panels_do_not_run_into_each_other():
    figure, axes = panels(1, 3, width=PAGE)
    for ax in axes.flat:
        plot_lr_sweep(sweep_table(), ax, x="optimizer.lm_head_lr")
    figure.draw_without_rendering()
    boxes = [ax.xaxis.label.get_window_extent() for ax in axes.flat]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
