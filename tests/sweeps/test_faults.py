"""Faults in a sweep: nothing finished is lost, nothing hangs, and the rest goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

import sandbox as sb
from helpers import sweeps as helpers
from helpers.sweeps import same
from sandbox.config import Factory
from sandbox.records.claims import EXPIRY
from sandbox.records.files import record_path
from sandbox.records.record import RunRecord
from sandbox.records.store import Store
from sandbox.sweeps import executors
from sandbox.sweeps.executors import slot_environments
from sandbox.sweeps.worker import unit_of, work

needs_two_cores = pytest.mark.skipif(
    len(slot_environments([sb.RunConfig(device="cpu")])) < 2, reason="one core is one slot: nothing runs in parallel"
)
ROOT = os.path.dirname(os.path.dirname(sb.__file__))


@pytest.fixture(scope="module", autouse=True)
def no_idle_workers():
    yield
    executors.close_idle()


@pytest.fixture
def importable(monkeypatch):
    """Let other processes import this package and the helpers."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ROOT, os.path.join(ROOT, "tests")]))


def of(tiny, optimizer, **kwargs):
    return replace(tiny, optimizer=Factory.of(optimizer, lr=0.1, **kwargs))


def statuses(records):
    return [record.status for record in records]


@needs_two_cores
@pytest.mark.parametrize(
    ("optimizer", "status", "why"),
    [
        (Factory.of(helpers.raising, lr=0.1), "failed", "KeyError: 'no such thing'"),
        (Factory.of(helpers.hungry, lr=0.1), "failed", "can't allocate memory"),
        (sb.MuonConfig(lr=1e30, lm_head_lr=1e30), "diverged", "training loss"),
    ],
    ids=["exception", "out of memory", "nan"],
)
def test_a_run_that_fails_is_a_row_and_the_others_go_on(tiny, tmp_path, optimizer, status, why):
    runs = [tiny, replace(tiny, optimizer=optimizer), replace(tiny, seed=1), replace(tiny, seed=2)]
    records = sb.sweep(runs, store=tmp_path)
    assert statuses(records) == ["finished", status, "finished", "finished"]
    assert why in records[1].error
    assert statuses(sb.sweep(runs, store=tmp_path)) == statuses(records)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["record.json"] * 4


def test_a_failure_stays_until_it_is_to_be_retried(tiny, tmp_path, capsys):
    run = of(tiny, helpers.raising)
    sb.sweep([run], store=tmp_path)
    made = []
    sb.sweep([run], store=tmp_path, on_record=made.append)
    assert made == []
    assert "1 failed before and is kept" in capsys.readouterr().err
    sb.sweep([run], store=tmp_path, retry=("failed", "interrupted"), on_record=made.append)
    assert statuses(made) == ["failed"]


def test_a_failure_whose_corpus_came_back_is_no_failure_any_more(tiny, tmp_path, text_file):
    late = tmp_path / "late.txt"
    run = replace(tiny, data=replace(tiny.data, corpus=str(late)))
    assert statuses(sb.sweep([run], store=tmp_path / "store")) == ["failed"]
    late.write_bytes(text_file.read_bytes())
    assert statuses(sb.sweep([run], store=tmp_path / "store")) == ["finished"]


def test_an_interrupted_run_goes_on_without_being_asked_for(tiny, tmp_path):
    RunRecord(config=tiny.resolved(), hash=tiny.hash, status="interrupted", error="stopped").save(tmp_path)
    assert statuses(sb.sweep([tiny], store=tmp_path)) == ["finished"]


@pytest.mark.parametrize("status", ["finished", "broken"])
def test_what_cannot_be_retried_is_refused(tiny, tmp_path, status):
    with pytest.raises(ValueError, match=f"retry='{status}' was given"):
        sb.sweep([tiny], store=tmp_path, retry=[status])


@pytest.mark.parametrize("content", ['{"schema": 1, "conf', '{"schema": 99}'], ids=["truncated", "newer schema"])
def test_a_record_that_cannot_be_read_costs_that_run_only(tiny, tmp_path, capsys, content):
    sb.sweep([tiny], store=tmp_path)
    path = record_path(tmp_path, tiny.hash)
    path.write_text(content)
    made = []
    sb.sweep([tiny], store=tmp_path, on_record=made.append)
    assert statuses(made) == ["finished"]
    assert [p.read_text() for p in path.parent.glob("*.unreadable-*")] == [content]
    assert "put aside" in capsys.readouterr().err


TWO = """
    import json, sys
    import sandbox as sb
    runs = [sb.RunConfig.from_dict(values) for values in json.load(open(sys.argv[1]))]
    print("ready", flush=True)
    input()
    records = sb.sweep(runs, store=sys.argv[2], workers=1, progress=False)
    print(json.dumps([[r.hash, r.status, r.timing["seconds"]] for r in records]))
"""


def test_two_sweeps_on_one_store_do_no_run_twice_and_return_the_same(tiny, tmp_path, importable):
    log = tmp_path / "log"
    runs = [of(replace(tiny, seed=i, steps=60), helpers.noting, log=str(log), name=str(i)) for i in range(8)]
    (tmp_path / "runs.json").write_text(json.dumps([run.to_dict() for run in runs]))
    command = [sys.executable, "-c", textwrap.dedent(TWO), str(tmp_path / "runs.json"), str(tmp_path / "store")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as two:
        for process in (one, two):
            assert process.stdout.readline() == "ready\n"
        for process in (one, two):
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [json.loads(process.communicate(timeout=60)[0]) for process in (one, two)]
    assert answers[0] == answers[1]
    assert [status for _, status, _ in answers[0]] == ["finished"] * 8
    assert sorted(log.read_text().split()) == sorted(str(i) for i in range(8))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system may be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk):
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    return ballast


def test_a_full_disk_loses_no_run_that_gets_room_later(tiny, small_disk):
    store, runs, fillers = small_disk / "store", [replace(tiny, seed=i) for i in range(4)], []

    def on_record(record):
        if record.config.seed == 0:
            fillers.append(fill(small_disk))
        if record.config.seed == 3:
            fillers[0].unlink()

    records = sb.sweep(runs, store=store, workers=1, on_record=on_record)
    assert statuses(records) == ["finished"] * 4
    assert {r.hash: same(r) for r in sb.load_records(store)} == {r.hash: same(r) for r in records}


def test_a_disk_that_stays_full_keeps_what_was_written_and_returns_the_rest(tiny, small_disk, capsys):
    store, runs = small_disk / "store", [replace(tiny, seed=i) for i in range(3)]
    sb.sweep(runs[:1], store=store)
    ballast = fill(small_disk)
    records = sb.sweep(runs, store=store, workers=1)
    assert statuses(records) == ["finished"] * 3
    assert "could not be written" in capsys.readouterr().err
    assert [r.hash for r in sb.load_records(store)] == [runs[0].hash]
    ballast.unlink()
    made = []
    again = sb.sweep(runs, store=store, workers=1, on_record=made.append)
    assert len(made) == 2
    assert [same(r) for r in again] == [same(r) for r in records]


FULL = """
    import json, resource, sys
    import sandbox as sb
    runs = [sb.RunConfig.from_dict(values) for values in json.load(open(sys.argv[1]))]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    def on_record(record):
        small = record.config.seed == 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048 if small else limits[0], limits[1]))
    records = sb.sweep(runs, store=sys.argv[2], workers=1, on_record=on_record, progress=False)
    print(json.dumps([r.status for r in records]))
"""


def test_a_record_that_was_cut_off_by_the_disk_is_written_later(tiny, tmp_path, importable):
    runs = [replace(tiny, seed=i) for i in range(3)]  # the second meets files of at most 2 KiB
    (tmp_path / "runs.json").write_text(json.dumps([run.to_dict() for run in runs]))
    command = [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path / "runs.json"), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == ["finished"] * 3
    assert "could not be written" in done.stderr
    assert statuses(sb.load_records(tmp_path / "store")) == ["finished"] * 3
    assert [p.name for p in (tmp_path / "store").rglob("*") if p.is_file()] == ["record.json"] * 3


class Refusing:
    """An executor that takes ``limit`` runs at a time and is asked to do them when it likes."""

    def __init__(self, limit):
        self.limit, self.waiting, self.refused = limit, [], 0

    def submit(self, function, argument):
        if len([future for future in self.waiting if not future.done()]) >= self.limit:
            self.refused += 1
            raise ConnectionError("queue full")
        future = Future()
        self.waiting.append(future)
        threading.Timer(0.3, lambda: future.set_result(function(argument))).start()
        return future


def test_an_executor_that_refuses_all_is_an_error_that_says_so(tiny, tmp_path):
    sb.sweep([tiny], store=tmp_path)
    with pytest.raises(RuntimeError, match=r"the executor refused run .*queue full; what finished is kept"):
        sb.sweep([tiny, replace(tiny, seed=1)], store=tmp_path, executor=Refusing(0))
    assert statuses(sb.load_records(tmp_path)) == ["finished"]


def test_an_executor_that_refuses_for_now_is_asked_again(tiny, tmp_path):
    executor = Refusing(1)
    records = sb.sweep([replace(tiny, seed=i) for i in range(3)], store=tmp_path, executor=executor)
    assert statuses(records) == ["finished"] * 3
    assert executor.refused


def test_what_is_no_executor_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="allowed is an object with a method submit"):
        sb.sweep([tiny], store=tmp_path, executor=4)


class Losing:
    """An executor whose workers die before they begin."""

    def __init__(self, after=lambda function, argument: None):
        self.submitted, self.after = 0, after

    def submit(self, function, argument):
        self.submitted += 1
        self.after(function, argument)
        future = Future()
        future.set_exception(ConnectionResetError("worker gone"))
        return future


def test_a_run_whose_worker_never_came_up_is_tried_twice(tiny, tmp_path):
    executor = Losing()
    (record,) = sb.sweep([tiny], store=tmp_path, executor=executor)
    assert executor.submitted == 2
    assert (record.status, "worker gone" in record.error) == ("failed", True)


def test_a_run_that_ended_before_its_worker_was_lost_is_not_lost(tiny, tmp_path):
    executor = Losing(after=lambda function, argument: function(argument))
    (record,) = sb.sweep([tiny], store=tmp_path, executor=executor)
    assert (executor.submitted, record.status) == (1, "finished")


@needs_two_cores
def test_a_callback_need_not_travel(tiny, tmp_path):
    lock, made = threading.Lock(), []

    def on_record(record):
        with lock:
            made.append(record.hash)

    runs = [replace(tiny, seed=i) for i in range(3)]
    sb.sweep(runs, store=tmp_path, on_record=on_record)
    assert sorted(made) == sorted(run.hash for run in runs)


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_a_stale_claim_does_not_stop_a_sweep(tiny, tmp_path, place):
    (tmp_path / tiny.hash).mkdir()
    claim = tmp_path / tiny.hash / "claim"
    if place == "here":
        code = f"import os; from sandbox.records import Store; Store({str(tmp_path)!r}).claim({tiny.hash!r}, 'gone'); "
        subprocess.run([sys.executable, "-c", code + "os._exit(1)"], check=False)
    else:
        claim.write_text(json.dumps({"token": "gone", "place": "a node", "pid": 1, "started": "1"}))
        past = time.time() - EXPIRY - 5
        os.utime(claim, (past, past))
    assert claim.exists()
    assert statuses(sb.sweep([tiny], store=tmp_path)) == ["finished"]
    assert not claim.exists()


def test_a_run_that_is_claimed_elsewhere_is_waited_for(tiny, tmp_path):
    store, other = Store(tmp_path), sb.train(replace(tiny, steps=3))
    store.room(tiny.hash).mkdir()
    claim = store.claim(tiny.hash, "other")
    theirs = replace(other, config=tiny.resolved(), hash=tiny.hash)

    def finish():
        store.save(theirs)
        claim.release()

    timer = threading.Timer(1.0, finish)
    timer.start()
    records = sb.sweep([tiny, replace(tiny, seed=1)], store=tmp_path)
    timer.join()
    assert len(records[0].curve["step"]) == 3
    assert statuses(records) == ["finished"] * 2


def test_a_worker_whose_claim_was_taken_over_ends_without_a_record(endless, tmp_path):
    store = Store(tmp_path)
    run = endless.resolved()
    store.room(run.hash).mkdir()
    answers = []
    worker = threading.Thread(target=lambda: answers.append(work(unit_of(run, run.hash, store))))
    worker.start()
    deadline = time.monotonic() + 20
    while not store.progress(run.hash) and time.monotonic() < deadline:
        time.sleep(0.05)
    (store.room(run.hash) / "claim").write_text(json.dumps({"token": "thief", "place": "a node"}))
    worker.join(timeout=20)
    assert answers == [{"hash": run.hash, "status": "elsewhere"}]
    assert store.load(run.hash) is None
    assert store.holds(run.hash, "thief")


def test_ctrl_c_in_this_process_leaves_an_interrupted_record(tiny, endless, tmp_path):
    def interrupt():
        while not (tmp_path / endless.hash / "progress.json").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sb.sweep([tiny, endless], store=tmp_path, workers=1)
    assert time.monotonic() - start < 30
    found = {r.hash: r for r in sb.load_records(tmp_path)}
    assert (found[tiny.hash].status, found[endless.hash].status) == ("finished", "interrupted")
    assert "KeyboardInterrupt" in found[endless.hash].error
    assert not list(tmp_path.rglob("claim"))
