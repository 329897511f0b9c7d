"""README and notebook 03.00 claim what the committed records hold, and the records are those of today's studies."""

from pathlib import Path

import matplotlib.image
import nbformat
import numpy as np
import pytest

import sandbox as sb
from sandbox import studies
from sandbox.studies import figures

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CELLS = nbformat.read(ROOT / "notebooks" / "03.00-Findings.ipynb", as_version=4).cells
FINDINGS = "\n".join(cell.source for cell in CELLS if cell.cell_type == "markdown")
RECORDS = {path.stem: sb.load_records(path) for path in sorted((ROOT / "notebooks" / "records").glob("*.jsonl"))}
QUICK = studies.preset("quick")
RATE_STUDIES = [studies.embed_rate(QUICK), studies.head_rate(QUICK), studies.scalar_rate(QUICK)]
NAMES = {"adamw": "AdamW", "lion": "Lion"}


def _loss(row):
    return f"{row.val_loss:.3f} ± {row.standard_error:.3f}"


def test_every_study_of_make_figures_is_there():
    assert set(RECORDS) == {*(study.name for study in RATE_STUDIES), "scalar-opt", "grouping"}


@pytest.mark.parametrize("study", [*RATE_STUDIES, studies.grouping(QUICK)], ids=lambda s: s.name)
def test_the_records_are_those_that_the_study_would_make_today(study):
    assert [record.config for record in RECORDS[study.name]] == [run.resolved() for run in study.runs]


def test_the_comparison_is_the_one_that_its_sweep_leads_to():
    final = studies.scalar_opt(RECORDS["scalar-rate"], QUICK)
    assert [record.config for record in RECORDS["scalar-opt"]] == [run.resolved() for run in final.runs]


@pytest.mark.parametrize("study", RATE_STUDIES, ids=lambda s: s.name)
def test_the_notebook_states_each_best_rate_as_it_was_measured(study):
    for row in figures.findings(study, RECORDS[study.name]).itertuples():
        assert f"| `{row.rate}` | {NAMES[row.scalar_opt]} | {row.best:g} | {_loss(row)} | {row.n} |" in FINDINGS


@pytest.mark.parametrize("study", RATE_STUDIES, ids=lambda s: s.name)
def test_every_optimum_lies_inside_its_grid_and_its_curve_is_a_u(study):
    assert figures.findings(study, RECORDS[study.name])["inside"].all()
    data = sb.table(RECORDS[study.name])
    for _, arm in sb.summarize(data).groupby("optimizer.scalar_opt"):
        means = arm.sort_values(study.x)["mean"].tolist()
        low = means.index(min(means))
        assert means[0] - means[low] > 0.005
        assert means[-1] - means[low] > 0.005


def test_the_notebook_states_the_difference_between_lion_and_adamw():
    row = figures.verdict(RECORDS["scalar-opt"]).iloc[0]
    assert f"{row['difference']:+.3f} ± {row['standard_error']:.3f} nats/token (n = {row['n']})" in FINDINGS


def test_the_notebook_states_what_the_wrong_groups_cost():
    row = figures.grouping_cost(RECORDS["grouping"]).iloc[0]
    assert f"{row['difference']:+.2f} ± {row['standard_error']:.2f} nats/token (n = {row['n']})" in FINDINGS


def test_the_caption_of_the_readme_is_what_was_measured():
    caption = " ".join(README.split())
    adamw, lion = figures.findings(studies.head_rate(QUICK), RECORDS["head-rate"]).itertuples()
    assert (adamw.scalar_opt, lion.scalar_opt) == ("adamw", "lion")
    assert f"AdamW's best is {adamw.best:g} with a validation loss of {_loss(adamw)} nats/token" in caption
    assert f"Lion's is {lion.best:g} with {_loss(lion)} (mean ± standard error, n = {adamw.n} seeds)" in caption


def test_the_picture_of_the_readme_is_what_the_records_draw(tmp_path, monkeypatch):
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path))
    models, optimizer = studies.growing_models(), studies.base_optimizer()
    figures.overview_figure(studies.head_rate(QUICK), RECORDS["head-rate"], models, optimizer)
    drawn, committed = (
        matplotlib.image.imread(path)
        for path in (tmp_path / "reports" / "overview.png", ROOT / "notebooks" / "figures" / "overview.png")
    )
    assert drawn.shape == committed.shape
    assert np.abs(drawn - committed).mean() < 1e-3  # of 1; another machine may round an edge of a glyph differently
