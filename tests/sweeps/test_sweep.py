"""Sweeps: what is finished stays finished, a fault costs one run, and parallel is serial, byte for byte."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

import sandbox as sb
from helpers.sweeps import same
from sandbox.config import Factory
from sandbox.records.files import record_path
from sandbox.records.store import Store
from sandbox.sweeps import executors
from sandbox.sweeps.executors import Slots, slot_environments


def dying_optimizer(model, lr):
    """Kill the process that builds it, as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def grid_of(tiny, seeds=2):
    return sb.grid(tiny, **{"optimizer.lm_head_lr": [1e-3, 1e-2], "seed": list(range(seeds))})


@pytest.fixture(scope="module", autouse=True)
def no_idle_workers():
    yield
    executors.close_idle()


def orphans():
    """Return the processes below this one but for workers that wait for the next sweep."""
    executors.close_idle()
    return children()


def children():
    """Return the processes below this one, as the kernel lists them; loky's resource tracker is one of its own."""
    found = subprocess.run(
        ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True
    )
    return [line for line in found.stdout.splitlines() if "loky" in line and "resource_tracker" not in line]


def test_a_grid_is_the_product_of_its_axes_last_fastest(tiny):
    runs = grid_of(tiny)
    assert [(r.optimizer.lm_head_lr, r.seed) for r in runs] == [(1e-3, 0), (1e-3, 1), (1e-2, 0), (1e-2, 1)]


def test_an_axis_may_swap_a_whole_config(tiny):
    kinds = sb.grid(tiny, optimizer=[sb.MuonConfig(), sb.AdamWConfig()])
    assert [type(run.optimizer).__name__ for run in kinds] == ["MuonConfig", "AdamWConfig"]


def test_an_unknown_axis_names_near_ones(tiny):
    with pytest.raises(ValueError, match="has no field 'embd_lr': did you mean 'embed_lr'"):
        sb.grid(tiny, **{"optimizer.embd_lr": [1.0]})


def test_an_axis_is_a_list(tiny):
    with pytest.raises(ValueError, match="allowed is a list of values"):
        sb.grid(tiny, seed=3)


def test_records_come_in_the_order_of_the_runs_and_are_one_folder_each(tiny, tmp_path):
    runs = grid_of(tiny)
    records = sb.sweep(runs, store=tmp_path, workers=1)
    assert [r.hash for r in records] == [r.hash for r in runs]
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert files == sorted(f"{r.hash}/record.json" for r in runs)


def test_equal_runs_are_trained_once(tiny, tmp_path):
    made = []
    records = sb.sweep([tiny, tiny, tiny], store=tmp_path, on_record=made.append)
    assert (len(records), len(made)) == (3, 1)


def test_what_is_stored_is_not_run_again(tiny, tmp_path):
    first = sb.sweep(grid_of(tiny)[:1], store=tmp_path)
    made = []
    again = sb.sweep(grid_of(tiny), store=tmp_path, workers=1, on_record=made.append)
    assert len(made) == 3
    assert again[0].timing == first[0].timing


@pytest.mark.parametrize("key", ["corpus_hash", "backend", "numerics_version"])
def test_a_stored_run_of_other_numerics_runs_again(tiny, tmp_path, key):
    (record,) = sb.sweep([tiny], store=tmp_path)
    path = record_path(tmp_path, record.hash)
    stored = json.loads(path.read_text())
    stored["environment"][key] = "another"
    path.write_text(json.dumps(stored))
    made = []
    sb.sweep([tiny], store=tmp_path, on_record=made.append)
    assert len(made) == 1
    assert json.loads(path.read_text())["environment"][key] != "another"


def test_a_file_cut_off_is_put_aside_and_its_run_starts_again(tiny, tmp_path, capsys):
    path = tmp_path / f"{tiny.hash}.json"
    path.write_text('{"schema": 1, "conf')
    (record,) = sb.sweep([tiny], store=tmp_path)
    assert record.status == "finished"
    assert len(list(tmp_path.glob("*.unreadable-*"))) == 1
    assert "put aside" in capsys.readouterr().err


def test_a_run_that_raises_is_a_record_and_the_sweep_goes_on(tiny, tmp_path):
    bad = replace(tiny, data=sb.DataConfig(corpus="/nowhere"))
    records = sb.sweep([bad, tiny], store=tmp_path, workers=1)
    assert [r.status for r in records] == ["failed", "finished"]
    assert "FileNotFoundError" in records[0].error
    made = []
    again = sb.sweep([bad, tiny], store=tmp_path, workers=1, on_record=made.append)
    assert made == []  # a failure is an outcome and stays one
    assert again[0].error == records[0].error
    sb.sweep([bad, tiny], store=tmp_path, workers=1, retry=["failed"], on_record=made.append)
    assert [r.status for r in made] == ["failed"]  # tried again where asked for, the finished one not


def test_no_workers_are_refused(tiny):
    with pytest.raises(ValueError, match="workers=0 was given"):
        sb.sweep([tiny], workers=0)


def test_slots_times_threads_stay_within_the_cores(tiny, monkeypatch):
    monkeypatch.setattr("loky.cpu_count", lambda: 8)
    monkeypatch.setattr(executors, "cpu_count", lambda: 8)
    for threads, slots in ((1, 8), (3, 2), (8, 1), (16, 1)):
        environments = slot_environments([replace(tiny, threads=threads)])
        assert len(environments) == slots
        assert {e["OMP_NUM_THREADS"] for e in environments} == {str(threads)}


def test_cuda_where_there_is_none_is_refused_unless_an_executor_has_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = replace(tiny, device="cuda")
    with pytest.raises(ValueError, match=r"device='cuda'.*'cpu'"):
        sb.sweep([run], store=tmp_path)
    sent = []

    class Elsewhere:
        def submit(self, function, unit):
            sent.append(unit["run"]["device"])
            record = replace(sb.train(tiny), config=run.resolved(), hash=run.hash)
            future = Future()
            future.set_result({"hash": run.hash, "status": "finished", "record": record.to_dict()})
            return future

    (record,) = sb.sweep([run], store=tmp_path, executor=Elsewhere())
    assert (sent, record.status) == (["cuda"], "finished")
    assert sb.load_records(tmp_path)[0].config.device == "cuda"


def test_a_gpu_is_a_slot(tiny, monkeypatch):
    run = replace(tiny, device="cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in slot_environments([run])] == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [e["CUDA_VISIBLE_DEVICES"] for e in slot_environments([run])] == ["5", "7"]


def test_a_run_on_several_gpus_takes_as_many_slots_and_sees_them_all(tiny, tmp_path, monkeypatch):
    submitted = []
    monkeypatch.setattr("sandbox.sweeps.executors._Slot.submit", lambda slot, unit: submitted.append(unit) or object())
    four = replace(tiny, mesh=sb.MeshConfig(dp_shard=4))
    slots = Slots([{"CUDA_VISIBLE_DEVICES": str(n)} for n in range(8)], [four])
    for _ in range(2):
        assert slots.fits(four, running=0)
        slots.submit(four, {})
    assert not slots.fits(tiny, running=2)
    seen = [set(unit["devices"].split(",")) for unit in submitted]
    assert [len(devices) for devices in seen] == [4, 4]
    assert seen[0] | seen[1] == set("01234567")


needs_two_cores = pytest.mark.skipif(
    len(slot_environments([sb.RunConfig(device="cpu")])) < 2, reason="one core is one slot: nothing runs in parallel"
)


@needs_two_cores
def test_parallel_is_serial_byte_for_byte(tiny, tmp_path):
    runs = grid_of(tiny)
    serial = sb.sweep(runs, store=tmp_path / "serial", workers=1)
    parallel = sb.sweep(runs, store=tmp_path / "parallel")
    assert [same(record) for record in serial] == [same(record) for record in parallel]
    assert orphans() == []


@needs_two_cores
def test_a_killed_worker_costs_one_run(tiny, tmp_path):
    killer = replace(tiny, optimizer=Factory.of(dying_optimizer, lr=0.1))
    runs = [*grid_of(tiny)[:2], killer, *grid_of(tiny)[2:]]
    records = sb.sweep(runs, store=tmp_path)
    assert [r.status for r in records] == ["finished", "finished", "failed", "finished", "finished"]
    assert "the worker process died" in records[2].error
    assert sb.table(records)["status"].tolist().count("finished") == 4
    assert orphans() == []


@needs_two_cores
def test_an_observer_that_raises_ends_the_workers(tiny, endless, tmp_path):
    def stop(record):
        until = time.monotonic() + 60
        while not Store(tmp_path).held(endless.hash) and time.monotonic() < until:
            time.sleep(0.05)  # the other worker may still be starting
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        sb.sweep([tiny, endless], store=tmp_path, on_record=stop)
    assert orphans() == []
    assert {r.hash: r.status for r in sb.load_records(tmp_path)} == {
        tiny.hash: "finished",
        endless.hash: "interrupted",
    }


SCRIPT = """
    import sandbox as sb
    from sandbox.config import RunConfig
    import json, sys
    runs = [RunConfig.from_dict(values) for values in json.load(open(sys.argv[1]))]
    sb.sweep(runs, store=sys.argv[2])
"""


def start(script, runs, tmp_path):
    (tmp_path / "runs.json").write_text(json.dumps([run.to_dict() for run in runs]))
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "runs.json"), str(tmp_path / "store")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "store").glob("*/record.json")):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline, "no run finished within a minute"
        time.sleep(0.1)
    return process


def members(session):
    found = subprocess.run(["ps", "-s", str(session), "-o", "pid="], capture_output=True, text=True)
    return found.stdout.split()


@needs_two_cores
@pytest.mark.parametrize(
    "kill", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "sigterm", "kernel killed"]
)
def test_what_is_finished_stays_and_no_process_is_left(tiny, endless, tmp_path, kill):
    process = start(SCRIPT, [tiny, endless, replace(endless, seed=1)], tmp_path)
    process.send_signal(kill)
    process.wait(timeout=30)
    process.stderr.close()
    deadline = time.monotonic() + 20
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert members(process.pid) == []
    statuses = {r.hash: r.status for r in sb.load_records(tmp_path / "store")}
    assert statuses.pop(tiny.hash) == "finished"
    assert set(statuses.values()) == {"interrupted"}
    made = []
    sb.sweep([tiny], store=tmp_path / "store", on_record=made.append)
    assert made == []


def workers_of(text):
    return {line.split()[0] for line in text}


@needs_two_cores
def test_workers_wait_for_the_next_sweep_and_not_for_long(tiny, tmp_path, monkeypatch):
    executors.close_idle()
    sb.sweep([replace(tiny, seed=i) for i in range(2)], store=tmp_path)
    first = workers_of(children())
    assert len(first) == 2
    monkeypatch.setattr(executors, "IDLE", 0.5)
    sb.sweep([replace(tiny, seed=i) for i in range(2, 6)], store=tmp_path)
    assert workers_of(children()) <= first
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children() == []


@needs_two_cores
def test_workers_that_hold_older_code_are_replaced(tiny, tmp_path, monkeypatch):
    stamps = executors._stamps([tiny])
    slot = executors._Slot({"OMP_NUM_THREADS": "1"})
    slot.stamps = stamps
    assert slot.suits({"OMP_NUM_THREADS": "1"}, stamps | {"another.py": 1})
    assert not slot.suits({"OMP_NUM_THREADS": "2"}, stamps)
    assert not slot.suits({"OMP_NUM_THREADS": "1"}, {path: time + 1 for path, time in stamps.items()})


def test_no_process_of_this_file_is_left():
    assert orphans() == []
    assert multiprocessing.active_children() == []
