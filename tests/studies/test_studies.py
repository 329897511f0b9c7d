"""Studies, their figures, and the command line: one origin, one place, nothing lost."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import sandbox as sb
from sandbox import studies
from sandbox.__main__ import main
from sandbox.studies import figures

SMOKE = studies.preset("smoke")


@pytest.fixture(scope="module")
def smoke_home(tmp_path_factory):
    """A home in which ``python -m sandbox figures`` ran once at smoke scale, with what it printed."""
    home = tmp_path_factory.mktemp("home")
    return home, run_figures(home).stdout


def run_figures(home, *, preset="smoke"):
    environment = {**os.environ, "SANDBOX_HOME": str(home)}
    command = [sys.executable, "-m", "sandbox", "figures", "--preset", preset, "--keep", str(home / "records")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)


def test_a_preset_is_named_by_the_environment(monkeypatch):
    monkeypatch.delenv("SANDBOX_PRESET", raising=False)
    assert studies.preset().name == "quick"
    monkeypatch.setenv("SANDBOX_PRESET", "laptop")
    assert studies.preset().name == "laptop"
    with pytest.raises(ValueError, match="preset 'quik' was given: did you mean 'quick'"):
        studies.preset("quik")


@pytest.mark.parametrize("scale", studies.PRESETS.values(), ids=studies.PRESETS)
@pytest.mark.parametrize("study", [studies.embed_rate, studies.head_rate, studies.scalar_rate, studies.grouping])
def test_arms_of_a_study_differ_in_what_it_asks_about_alone(study, scale):
    made = study(scale)
    rows = {json.dumps(run.to_dict()) for run in made.runs}
    assert len(rows) == len(made.runs)
    for run in made.runs:
        assert replace(run, optimizer=made.runs[0].optimizer, model=made.runs[0].model, seed=0) == made.runs[0]
        assert replace(run.model, width=scale.model.width) == scale.model
    assert {run.seed for run in made.runs} == set(range(scale.seeds))


def test_a_grid_of_rates_is_even_in_the_logarithm():
    assert studies.log_spaced(0.001, 1, 4) == [0.001, 0.01, 0.1, 1.0]


def test_the_final_comparison_uses_the_best_rates_and_fresh_seeds():
    study = studies.scalar_rate(SMOKE)
    best = {"adamw": study.runs[2].optimizer.scalar_lr, "lion": study.runs[0].optimizer.scalar_lr}
    records = [
        sb.RunRecord(
            config=run.resolved(),
            hash=run.hash,
            status="finished",
            evaluations={"step": [1], "val_loss": [2.0 - (run.optimizer.scalar_lr == best[opt])], "val_bpb": [1.0]},
        )
        for run in study.runs
        for opt in [run.optimizer.scalar_opt]
    ]
    final = studies.scalar_opt(records, SMOKE)
    assert len(final.runs) == 2 * SMOKE.final_seeds
    for run in final.runs:
        rate = best[run.optimizer.scalar_opt]
        assert (run.optimizer.scalar_lr, run.optimizer.embed_lr, run.optimizer.lm_head_lr) == (rate, rate, rate)
    assert {run.seed for run in final.runs}.isdisjoint({run.seed for run in study.runs})


def test_group_shares_add_up_for_models_of_every_size():
    tables = studies.group_tables(studies.known_models(), sb.MuonConfig())
    assert tables.groupby("model")["share"].sum().tolist() == pytest.approx([1.0] * 5)
    sizes = tables.groupby("model")["elements"].sum()
    assert sizes.min() < 2e6
    assert sizes["DeepSeek-V3"] == pytest.approx(671e9, rel=0.01)


def test_the_share_of_the_tables_falls_with_width():
    tables = studies.group_tables(studies.growing_models(), sb.MuonConfig(), label="model.width")
    shares = tables[tables["role"] == "embed"].set_index("model.width")["share"]
    assert shares.is_monotonic_decreasing


def test_the_command_writes_every_figure_in_every_form(smoke_home):
    home, printed = smoke_home
    names = {"embed-rate", "head-rate", "scalar-rate", "scalar-opt", "grouping", "groups", "shares", "overview"}
    files = {path.name for path in (home / "reports").iterdir()}
    assert files == {f"{name}.{ending}" for name in names for ending in ("pdf", "svg", "png", "csv", "json")}
    assert "Best rates" in printed
    assert str(home / "reports" / "embed-rate.png") in printed


def test_the_command_again_trains_nothing_and_writes_the_same_bytes(smoke_home):
    home, printed = smoke_home
    before = {path: path.read_bytes() for path in (home / "reports").iterdir()}
    stored = {path: path.stat().st_mtime_ns for path in (home / "runs").iterdir()}
    assert run_figures(home).stdout == printed
    assert {path: path.stat().st_mtime_ns for path in (home / "runs").iterdir()} == stored
    assert {path: path.read_bytes() for path in (home / "reports").iterdir()} == before


def test_the_kept_records_are_those_of_the_store(smoke_home):
    home, _ = smoke_home
    kept = {path.stem: sb.load_records(path) for path in (home / "records").iterdir()}
    assert set(kept) == {"embed-rate", "head-rate", "scalar-rate", "scalar-opt", "grouping"}
    hashes = {record.hash for records in kept.values() for record in records}
    assert hashes == {path.stem for path in (home / "runs").iterdir()}


def test_killing_the_command_half_way_loses_no_finished_run(tmp_path):
    environment = {**os.environ, "SANDBOX_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "sandbox", "figures", "--preset", "smoke"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store, deadline = tmp_path / "runs", time.monotonic() + 120
    while len(list(store.glob("*/record.json"))) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in store.glob("*/record.json")}
    run_figures(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list(store.glob("*/record.json"))) > len(kept)


def test_bad_input_is_one_line_and_an_exit_status(capsys, monkeypatch):
    monkeypatch.setenv("SANDBOX_PRESET", "quik")
    assert main(["figures"]) == 2
    assert capsys.readouterr().err == "error: preset 'quik' was given: did you mean 'quick'?\n"


def test_several_widths_make_a_sweep_and_a_verdict_of_each():
    scale = replace(SMOKE, widths=(32, 64))
    study = studies.scalar_rate(scale)
    assert len(study.runs) == 2 * len(studies.scalar_rate(SMOKE).runs)
    rates = sorted({run.optimizer.scalar_lr for run in study.runs})
    best = {(32, "adamw"): rates[1], (64, "adamw"): rates[2], (32, "lion"): rates[0], (64, "lion"): rates[1]}

    def finished(run):
        arm = (run.model.width, run.optimizer.scalar_opt)
        loss = 2.0 - (run.optimizer.scalar_lr == best[arm]) + (arm[1] == "lion") * arm[0]
        evaluations = {"step": [1], "val_loss": [loss], "val_bpb": [1.0]}
        return sb.RunRecord(config=run.resolved(), hash=run.hash, status="finished", evaluations=evaluations)

    records = [finished(run) for run in study.runs]
    found = figures.findings(study, records)
    assert {(row.width, row.scalar_opt): row.best for row in found.itertuples()} == best
    assert set(figures.against_best(study, records)["difference"]) == {1.0}
    final = studies.scalar_opt(records, scale)
    assert len(final.runs) == 4 * scale.final_seeds
    assert figures.verdict([finished(run) for run in final.runs])["difference"].tolist() == [32.0, 64.0]


def test_neighbours_of_the_best_rate_are_compared_with_it():
    study = studies.head_rate(SMOKE)
    records = [
        sb.RunRecord(
            config=run.resolved(),
            hash=run.hash,
            status="finished",
            evaluations={
                "step": [1],
                "val_loss": [abs(i // SMOKE.seeds % SMOKE.rates - 1) + run.seed],
                "val_bpb": [1.0],
            },
        )
        for i, run in enumerate(study.runs)
    ]
    found = figures.findings(study, records)
    assert found["best"].tolist() == [study.runs[SMOKE.seeds].optimizer.lm_head_lr] * 2
    assert found["inside"].all()
    near = figures.against_best(study, records)
    assert near["difference"].tolist() == [1.0] * 4
    assert near["standard_error"].tolist() == [0.0] * 4
