"""Any executor: the same runs give the same bytes, wherever they are trained, and stop when they are asked to."""

import gc
import os
import signal
import subprocess
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import sandbox as sb
from helpers import sweeps as helpers
from helpers.sweeps import same
from sandbox.config import Factory

ROOT = os.path.dirname(os.path.dirname(sb.__file__))


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Let other processes import this package and the helpers."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ROOT, os.path.join(ROOT, "tests")]))


@pytest.fixture
def runs(tiny):
    return sb.grid(tiny, **{"optimizer.scalar_opt": ["adamw", "lion"], "seed": [0, 1]})


@pytest.fixture
def serial(runs, tmp_path):
    return [same(record) for record in sb.sweep(runs, store=tmp_path / "serial", workers=1)]


def swept(runs, store, executor, **options):
    """Return what a sweep gives through that executor, once it is clear that the records lie in the store."""
    records = sb.sweep(runs, store=store, executor=executor, **options)
    assert {r.hash: same(r) for r in sb.load_records(store)} == {r.hash: same(r) for r in records}
    assert [p.name for p in store.rglob("*") if p.is_file()] == ["record.json"] * len(runs)
    return [same(record) for record in records]


def test_threads_give_what_one_thread_gives(runs, serial, tmp_path):
    with ThreadPoolExecutor(4) as executor:
        assert swept(runs, tmp_path / "store", executor) == serial


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_bound_what_an_executor_is_given_at_a_time(runs, tmp_path, workers):
    class Counting(ThreadPoolExecutor):
        most, now = 0, 0

        def submit(self, function, argument):
            self.now += 1
            self.most = max(self.most, self.now)
            future = super().submit(function, argument)
            future.add_done_callback(lambda _: setattr(self, "now", self.now - 1))
            return future

    with Counting(4) as executor:
        swept(runs, tmp_path / "store", executor, workers=workers)
    assert executor.most == workers


def test_dask_workers_over_tcp_give_what_one_process_gives(runs, serial, tmp_path):
    distributed = pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dask's own start and end
        cluster = distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, protocol="tcp://", dashboard_address=None
        )
        with cluster, distributed.Client(cluster) as client:
            assert swept(runs, tmp_path / "store", client.get_executor(pure=False)) == serial


def test_submitit_jobs_give_what_one_process_gives(runs, serial, tmp_path):
    submitit = pytest.importorskip("submitit", reason="the extra 'cluster' is not installed")
    executor = submitit.LocalExecutor(tmp_path / "logs")
    assert swept(runs, tmp_path / "store", executor, workers=2) == serial


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_submitit_in_this_process_gives_the_same(runs, serial, tmp_path):
    submitit = pytest.importorskip("submitit", reason="the extra 'cluster' is not installed")
    executor = submitit.AutoExecutor(tmp_path / "logs", cluster="debug")
    assert swept(runs, tmp_path / "store", executor) == serial
    gc.collect()  # submitit leaves its log files open


def test_a_job_preempted_by_sigterm_is_requeued_and_ends_as_if_nothing_had_been(tiny, tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit", reason="the extra 'cluster' is not installed")
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "TERM")
    log = tmp_path / "log"
    run = replace(tiny, optimizer=Factory.of(helpers.noting, lr=0.1, log=str(log), name="begun", first_pause=60.0))
    jobs = []

    class Preempted(submitit.LocalExecutor):
        def submit(self, function, argument):
            jobs.append(super().submit(function, argument))
            return jobs[-1]

    def preempt():
        while not log.exists():
            time.sleep(0.1)
        task = subprocess.check_output(["ps", "--ppid", jobs[0].job_id, "-o", "pid="], text=True)
        os.kill(int(task), signal.SIGTERM)

    threading.Thread(target=preempt, daemon=True).start()
    executor = Preempted(tmp_path / "logs")
    executor.update_parameters(timeout_min=60)  # so far from its end a signal is a preemption
    (record,) = sb.sweep([run], store=tmp_path / "store", executor=executor)
    assert record.status == "finished", record.error
    assert len(jobs) == 1
    assert log.read_text().split() == ["begun"] * 2


def test_a_sweep_that_ends_early_stops_what_an_executor_is_at(tiny, endless, tmp_path):
    def stop(record):
        raise RuntimeError("enough")

    waiting = replace(endless, seed=5)
    start = time.monotonic()
    with ThreadPoolExecutor(1) as executor, pytest.raises(RuntimeError, match="enough"):
        sb.sweep([tiny, endless, waiting], store=tmp_path, executor=executor, on_record=stop)
    assert time.monotonic() - start < 20
    statuses = {r.hash: r.status for r in sb.load_records(tmp_path)}
    assert statuses.pop(tiny.hash) == "finished"
    assert set(statuses.values()) <= {"interrupted"}
    assert not list(tmp_path.rglob("claim"))
