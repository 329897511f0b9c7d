"""What a sweep shows: little, in place, and true; and a notebook that is restarted in the middle of one."""

import io
import json
import textwrap
import time
from dataclasses import replace

import nbformat
import pandas as pd
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

import sandbox as sb
from sandbox.records.record import RunRecord
from sandbox.records.store import Store
from sandbox.sweeps.display import CURVES, Display, _draw


def display(runs, records, store, **options):
    return Display({run.hash: run for run in runs}, records, store, **({"bar": False, "watch": False} | options))


def test_the_table_has_a_row_for_each_run_whatever_its_state(tiny, tmp_path):
    done, running, queued = (replace(tiny, seed=seed).resolved() for seed in range(3))
    store = Store(tmp_path)
    store.room(running.hash).mkdir()
    claim = store.claim(running.hash, "token")
    claim.touch({"step": 3, "tokens": 192, "curve": {"step": [1, 3], "train_loss": [6.0, 5.0]}})
    shown = display([done, running, queued], {done.hash: sb.train(done)}, store)
    shown.tick([running.hash])
    table = shown.table()
    assert table["status"].tolist() == ["finished", "running", "queued"]
    assert table["step"].tolist() == ["12/12", "3/12", "0/12"]
    assert table["train_loss"][1] == 5.0
    assert table["val_loss"].isna().tolist() == [False, True, True]
    assert table["seed"].tolist() == [0, 1, 2]
    assert list(shown.curves()) == [running.hash, done.hash]
    assert _draw(shown.curves(), shown.running).startswith(b"\x89PNG")


def test_only_a_few_curves_are_drawn(tiny, tmp_path):
    runs = [replace(tiny, seed=seed).resolved() for seed in range(CURVES + 5)]
    record = sb.train(tiny)
    records = {run.hash: replace(record, config=run, hash=run.hash) for run in runs}
    assert len(display(runs, records, Store(tmp_path)).curves()) == CURVES


def test_into_a_file_the_bar_goes_a_few_times_only(tiny, tmp_path, capsys):
    runs = [replace(tiny, seed=seed) for seed in range(30)]
    sb.sweep(runs, store=tmp_path, workers=1)
    shown = capsys.readouterr().err
    assert shown.count("\r") <= 6
    assert "30/30 done, 0 running, 0 failed or diverged" in shown
    assert "tokens/s" in shown


def test_nothing_is_shown_where_nothing_is_to_be(tiny, tmp_path, capsys):
    sb.sweep([tiny], store=tmp_path, progress=False)
    sb.sweep([tiny], store=tmp_path)  # nothing to do
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""


def test_the_bar_counts_failures(tiny, tmp_path, capsys):
    broken = RunRecord(config=tiny.resolved(), hash=tiny.hash, status="failed")
    shown = display([tiny.resolved()], {}, Store(tmp_path), bar=True)
    shown.ended(broken)
    shown.close()
    assert "1/1 done, 0 running, 1 failed or diverged" in capsys.readouterr().err


CELL = """
    import json
    import sandbox as sb
    runs = [sb.RunConfig.from_dict(values) for values in json.load(open({runs!r}))]
    records = sb.sweep(runs, store={store!r}, watch=True)
"""


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter_client's own
def test_a_notebook_restarted_in_the_middle_gives_the_same_table_in_place(tiny, tmp_path):
    runs = [replace(tiny, steps=steps, seed=i) for i, steps in enumerate([12, 12, 800, 800])]
    (tmp_path / "runs.json").write_text(json.dumps([run.to_dict() for run in runs]))
    store = tmp_path / "store"
    cell = textwrap.dedent(CELL.format(runs=str(tmp_path / "runs.json"), store=str(store)))
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute(cell)
        deadline = time.monotonic() + 60
        while not list(store.glob("*/progress.json")) or not list(store.glob("*/record.json")):
            assert time.monotonic() < deadline, "no run finished within a minute"
            time.sleep(0.05)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
    assert len([r for r in sb.load_records(store) if r.status == "finished"]) < 4

    code = [cell, "print(sb.table(records).to_json(orient='split', double_precision=15))"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in code])
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    shown = [output for output in notebook.cells[0].outputs if output.output_type == "display_data"]
    texts = [output.data["text/html"] for output in shown if "text/html" in output.data and "finished" in str(output)]
    assert texts[0].count("finished") == 4
    assert sum("image/png" in output.data for output in shown) == 1
    assert len(notebook.cells[0].outputs) <= 5
    table = pd.read_json(io.StringIO(notebook.cells[1].outputs[0].text), orient="split", precise_float=True)
    straight = sb.table(sb.sweep(runs, store=tmp_path / "straight", workers=1))
    pd.testing.assert_frame_equal(table, straight, check_dtype=False, rtol=1e-12)
