"""The README's and notebooks' claims are those of the committed records, and the records those of today's studies."""

from pathlib import Path

import pytest

import sandbox as sb
from sandbox import studies
from sandbox.studies import figures

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
RECORDS = {path.stem: sb.load_records(path) for path in sorted((ROOT / "notebooks" / "records").glob("*.jsonl"))}
QUICK = studies.preset("quick")
RATE_STUDIES = [studies.embed_rate(QUICK), studies.head_rate(QUICK), studies.scalar_rate(QUICK)]
NAMES = {"adamw": "AdamW", "lion": "Lion"}


def test_every_study_of_make_figures_is_there():
    assert set(RECORDS) == {*(study.name for study in RATE_STUDIES), "scalar-opt", "grouping"}


@pytest.mark.parametrize("study", [*RATE_STUDIES, studies.grouping(QUICK)], ids=lambda s: s.name)
def test_the_records_are_those_that_the_study_would_make_today(study):
    assert [record.config for record in RECORDS[study.name]] == [run.resolved() for run in study.runs]


def test_the_comparison_is_the_one_that_its_sweep_leads_to():
    final = studies.scalar_opt(RECORDS["scalar-rate"], QUICK)
    assert [record.config for record in RECORDS["scalar-opt"]] == [run.resolved() for run in final.runs]


@pytest.mark.parametrize("study", RATE_STUDIES, ids=lambda s: s.name)
def test_the_readme_states_each_best_rate_as_it_was_measured(study):
    for row in figures.findings(study, RECORDS[study.name]).itertuples():
        loss = f"{row.val_loss:.3f} ± {row.standard_error:.3f}"
        assert f"| `{row.rate}` | {NAMES[row.scalar_opt]} | {row.best:g} | {loss} | {row.n} |" in README


@pytest.mark.parametrize("study", RATE_STUDIES, ids=lambda s: s.name)
def test_every_optimum_lies_inside_its_grid_and_its_curve_is_a_u(study):
    assert figures.findings(study, RECORDS[study.name])["inside"].all()
    data = sb.table(RECORDS[study.name])
    for _, arm in sb.summarize(data).groupby("optimizer.scalar_opt"):
        means = arm.sort_values(study.x)["mean"].tolist()
        low = means.index(min(means))
        assert means[0] - means[low] > 0.005
        assert means[-1] - means[low] > 0.005


def test_the_readme_states_the_difference_between_lion_and_adamw():
    row = figures.verdict(RECORDS["scalar-opt"]).iloc[0]
    assert f"{row['difference']:+.3f} ± {row['standard_error']:.3f} nats/token (n = {row['n']})" in README


def test_the_readme_states_what_the_wrong_groups_cost():
    row = figures.grouping_cost(RECORDS["grouping"]).iloc[0]
    assert f"{row['difference']:+.2f} ± {row['standard_error']:.2f} nats/token (n = {row['n']})" in README


def test_the_figures_of_the_readme_are_there():
    for name in ("embed-rate", "head-rate", "scalar-rate"):
        assert f"notebooks/figures/{name}.png" in README
        assert (ROOT / "notebooks" / "figures" / f"{name}.png").is_file()
