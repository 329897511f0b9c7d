"""Claims against seed noise: paired by seed, with standard error and n."""

import math

import pandas as pd
import pytest

import sandbox as sb
from sandbox.records.comparison import summarize


def runs(rows):
    columns = ["opt", "lr", "seed", "val_loss", "status"]
    return pd.DataFrame([(*row, "finished")[:5] for row in rows], columns=columns).assign(config_hash="x", val_bpb=1.0)


PAIRED = runs([("a", 1, 0, 2.0), ("a", 1, 1, 4.0), ("b", 1, 0, 1.5), ("b", 1, 1, 3.7)])


def test_a_difference_is_paired_by_seed():
    row = sb.compare(PAIRED, baseline={"opt": "a"}).iloc[0]
    assert (row["opt"], row["n"]) == ("b", 2)
    assert row["difference"] == pytest.approx(-0.4)
    assert row["standard_error"] == pytest.approx(0.1)  # of -0.5 and -0.3; unpaired it would be 1.5


def test_pairing_does_not_depend_on_the_order_of_rows():
    shuffled = PAIRED.sample(frac=1, random_state=3).reset_index(drop=True)
    pd.testing.assert_frame_equal(
        sb.compare(PAIRED, baseline={"opt": "a"}), sb.compare(shuffled, baseline={"opt": "a"})
    )


def test_only_seeds_that_both_arms_finished_count():
    table = runs([("a", 1, 0, 2.0), ("a", 1, 1, 4.0), ("b", 1, 1, 3.0), ("b", 1, 2, 9.0)])
    row = sb.compare(table, baseline={"opt": "a"}).iloc[0]
    assert (row["difference"], row["n"]) == (-1.0, 1)
    assert math.isnan(row["standard_error"])


def test_a_diverged_run_is_no_pair():
    table = pd.concat([PAIRED, runs([("c", 1, 0, math.nan, "diverged"), ("c", 1, 1, 3.0)])], ignore_index=True)
    row = sb.compare(table, baseline={"opt": "a"}).set_index("opt").loc["c"]
    assert (row["difference"], row["n"]) == (-1.0, 1)


@pytest.mark.parametrize(("baseline", "arms"), [({"opt": "z"}, 0), ({"lr": 1}, 2)])
def test_a_baseline_is_exactly_one_arm(baseline, arms):
    with pytest.raises(ValueError, match=f"selects {arms} arms; allowed is one"):
        sb.compare(PAIRED, baseline=baseline)


def test_a_missing_column_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="column 'optt' was given; the table has 'opt'"):
        sb.compare(PAIRED, baseline={"optt": "a"})
    with pytest.raises(ValueError, match="column 'nothing' was given"):
        sb.best(PAIRED, by="nothing")


def test_the_best_arm_is_that_of_the_lowest_mean():
    table = runs([(o, lr, s, (lr - 2) ** 2 + s + (o == "a")) for o in "ab" for lr in (1, 2, 3) for s in (0, 1)])
    assert sb.best(table)[["opt", "lr"]].values.tolist() == [["b", 2]]
    assert sb.best(table, by="opt")[["opt", "lr", "mean", "n"]].values.tolist() == [["a", 2, 1.5, 2], ["b", 2, 0.5, 2]]


def test_an_arm_that_lost_a_seed_is_not_the_best():
    table = runs([("a", 1, 0, 1.0), ("a", 1, 1, math.nan, "diverged"), ("b", 1, 0, 2.0), ("b", 1, 1, 2.0)])
    assert sb.best(table)["opt"].tolist() == ["b"]
    assert summarize(table)["diverged"].tolist() == [1, 0]


def test_no_finished_arm_is_an_error():
    with pytest.raises(ValueError, match="no arm finished"):
        sb.best(runs([("a", 1, 0, math.nan, "diverged")]))


def test_a_value_of_none_selects_the_default_arm():
    table = runs([(None, 1, 0, 2.0), (None, 1, 1, 2.0), ("b", 1, 0, 1.0), ("b", 1, 1, 1.0)])
    assert sb.compare(table, baseline={"opt": None})["difference"].tolist() == [-1.0]
