"""Sweeps from the command line: a file in, a store and a table out."""

import io
import json

import pandas as pd
import pytest

import sandbox as sb
from sandbox.__main__ import main
from sandbox.sweeps.grids import read_spec, runs_of


def test_a_file_says_what_grid_does(tiny, tmp_path):
    axes = {"optimizer.lm_head_lr": [1e-3, 1e-2], "seed": [0, 1]}
    (tmp_path / "spec.json").write_text(json.dumps({"base": tiny.to_dict(), "axes": axes}))
    assert read_spec(tmp_path / "spec.json") == sb.grid(tiny, **axes)


def test_what_the_base_leaves_out_takes_its_default():
    (run,) = runs_of({"base": {"model": {"width": 48, "heads": 3}, "steps": 5, "optimizer": {"lr": 0.5}}})
    assert (run.model.width, run.model.heads, run.model.depth) == (48, 3, sb.ModelConfig().depth)
    assert (run.steps, run.optimizer.lr, run.optimizer.embed_lr) == (5, 0.5, sb.RunConfig().optimizer.embed_lr)
    assert runs_of({}) == [sb.RunConfig()]


def test_another_kind_stands_for_itself():
    (run,) = runs_of({"base": {"optimizer": {"kind": "AdamWConfig", "lr": 0.5}}})
    assert run.optimizer == sb.AdamWConfig(lr=0.5)
    kinds = runs_of({"axes": {"optimizer": [{"kind": "DionConfig"}, {"kind": "Dion2Config", "fraction": 0.5}]}})
    assert [run.optimizer for run in kinds] == [sb.DionConfig(), sb.Dion2Config(fraction=0.5)]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"bas": {}}, "key 'bas' was given: did you mean 'base'"),
        ([], "list was given; allowed is an object with base and axes"),
        ({"base": 3}, "base=3 was given; allowed is an object"),
        ({"axes": {"seed": 3}}, "axis seed=3 was given; allowed is a list"),
        ({"axes": {"seed": "01"}}, "axis seed='01' was given; allowed is a list"),
        ({"axes": {"optimizer.embd_lr": [1]}}, "did you mean 'embed_lr'"),
        ({"base": {"stepss": 3}}, "did you mean 'steps'"),
        ({"base": {"model": {"wdth": 3}}}, "did you mean 'width'"),
    ],
)
def test_what_does_not_exist_is_an_error_with_near_names(spec, sentence):
    with pytest.raises(ValueError, match=sentence):
        runs_of(spec)


def test_a_sweep_from_the_command_line_leaves_a_store_that_the_table_reads(tiny, tmp_path, capsys):
    (tmp_path / "spec.json").write_text(json.dumps({"base": tiny.to_dict(), "axes": {"seed": [0, 1]}}))
    store = str(tmp_path / "store")
    assert main(["sweep", str(tmp_path / "spec.json"), "--store", store, "--workers", "1", "--watch"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("finished") == 2
    assert shown.err.count("nats/token, seed=") == 2
    assert main(["table", store, "--csv"]) == 0
    table = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert table["config_hash"].tolist() == sorted(table["config_hash"])
    assert (table["status"].tolist(), sorted(table["seed"])) == (["finished"] * 2, [0, 1])
    assert main(["table", store]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:2] == ["config_hash", "status"]


def test_a_failed_run_is_an_exit_status_and_a_traceback(tiny, tmp_path, capsys):
    base = tiny.to_dict() | {"data": {"corpus": "/nowhere.txt"}}
    (tmp_path / "spec.json").write_text(json.dumps({"base": base}))
    command = ["sweep", str(tmp_path / "spec.json"), "--store", str(tmp_path / "store"), "--retry", "failed"]
    assert main(command) == 1
    assert "FileNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["sweep", "nowhere.json"], ["table", "nowhere"]])
def test_bad_input_is_one_sentence(command, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path))
    assert main(command) == 2
    assert "nowhere" in capsys.readouterr().err
