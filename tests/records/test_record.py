"""Records: strict JSON, whole files, plain tables."""

import dataclasses
import json
import math
import os

import numpy as np
import pytest

import sandbox as sb
from sandbox.records import record as rooms_record
from sandbox.records.files import home, reports_home, write_atomic
from sandbox.records.record import RunRecord

BASE = sb.RunConfig(device="cpu", dtype="float32", context=8)


def make(run=BASE, *, losses=(3.0, 2.0), status="finished", val_loss=1.5):
    steps = list(range(1, len(losses) + 1))
    return RunRecord(
        config=run,
        hash=run.hash,
        status=status,
        curve={
            "step": steps,
            "tokens": [8 * s for s in steps],
            "train_loss": list(losses),
            "factor": [1.0] * len(steps),
        },
        evaluations={"step": steps[-1:], "val_loss": [val_loss], "val_bpb": [math.nan]},
        rms={"step": [1], "role": ["matrix"], "weight": [1.0], "gradient": [0.1], "update": [0.01]},
        groups=[{"role": "matrix", "elements": 10, "lr": run.optimizer.lr, "weight_decay": 0.0}],
    )


def runs():
    return sb.grid(BASE, **{"optimizer.lm_head_lr": [None, 0.1], "seed": [0, 1]})


def test_a_record_survives_its_file(tmp_path):
    record = make()
    again = RunRecord.load(record.save(tmp_path))
    assert json.dumps(again.to_dict()) == json.dumps(record.to_dict())
    assert again.config == record.config


def test_its_file_is_strict_json_whatever_the_loss(tmp_path):
    record = make(losses=(3.0, math.inf, math.nan), status="diverged")
    text = record.save(tmp_path).read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert np.isnan(RunRecord.load(tmp_path / record.hash / "record.json").curve["train_loss"][1:]).all()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"schema": 1, "config": {', "holds no readable record"),
        ('{"schema": 99}', "record schema 99 was given; allowed is up to 1"),
        ("[]", "holds no readable record"),
        ("{}", "record schema None"),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path, content, sentence):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        RunRecord.load(tmp_path / "x.json")
    assert "x.json" in str(caught.value)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_only_a_finished_run_has_a_validation_loss():
    assert make().val_loss == 1.5
    assert math.isnan(make(status="diverged").val_loss)
    assert math.isnan(make(status="diverged").val_bpb)


def test_the_table_has_one_row_a_run_and_the_columns_that_vary():
    df = sb.table(make(run) for run in runs())
    assert list(df.columns) == ["config_hash", "status", "val_loss", "val_bpb", "optimizer.lm_head_lr", "seed"]
    assert df["config_hash"].tolist() == [run.hash for run in runs()]
    assert df["optimizer.lm_head_lr"].fillna(-1).tolist() == [-1, -1, 0.1, 0.1]


def test_a_field_that_only_one_optimizer_has_does_not_vary():
    other = dataclasses.replace(BASE, optimizer=sb.AdamWConfig(lr=BASE.optimizer.lr))
    columns = sb.table([make(), make(other)]).columns
    assert "optimizer.kind" in columns
    assert "optimizer.mu" not in columns


def test_tables_of_nothing_are_empty():
    assert sb.table([]).empty
    assert sb.curves([]).empty
    assert sb.arms([]).empty


def test_curves_are_long_and_carry_evaluations_where_they_were_made():
    long = sb.curves(make(run) for run in runs())
    assert len(long) == 8
    first = long[long["config_hash"] == runs()[0].hash]
    assert first["train_loss"].tolist() == [3.0, 2.0]
    assert first["val_loss"].isna().tolist() == [True, False]


def test_a_failed_run_is_a_row_without_a_curve():
    failed = RunRecord(config=BASE, hash=BASE.hash, status="failed", error="Traceback")
    assert sb.table([failed])["status"].tolist() == ["failed"]
    assert len(sb.curves([failed, make(runs()[1])])) == 2


def test_arms_say_what_was_compared():
    arms = sb.arms(make(run) for run in runs())
    assert arms["seeds"].tolist() == [2, 2]
    assert arms["steps"].tolist() == [200, 200]
    assert arms["tokens"].tolist() == [16, 16]
    assert arms["matrix.elements"].tolist() == [10, 10]
    assert arms["matrix.lr"].tolist() == [0.02, 0.02]


def test_stores_lie_at_the_projects_root_wherever_a_kernel_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("SANDBOX_HOME", raising=False)
    monkeypatch.delenv("SANDBOX_PRESET", raising=False)
    monkeypatch.chdir(tmp_path)
    assert (home() / "pyproject.toml").exists()
    assert reports_home() == home() / "reports"


def test_the_environment_moves_them(tmp_path, monkeypatch):
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path))
    assert home() == tmp_path


def test_smoke_scale_writes_to_a_temporary_place(monkeypatch):
    monkeypatch.delenv("SANDBOX_HOME", raising=False)
    monkeypatch.setenv("SANDBOX_PRESET", "smoke")
    assert "dion-sandbox-smoke-" in home().name
    assert home() == home()
    assert rooms_record.__file__.startswith(str(home())) is False


def test_an_empty_store_is_said_to_be_empty(tmp_path):
    with pytest.raises(ValueError, match="no record was found in"):
        sb.load_records(tmp_path)
