"""Where runs are trained: in this process, in local slots, or in an executor that the user brings.

Each slot is a loky pool of one worker. A worker that dies breaks its whole pool; with one worker that costs one run.
Workers are new processes (no fork, since CUDA may be in use). They get their thread count and their GPU from the
environment, before they import torch: more threads than cores made a 50 ms step take 2,000 ms.
A worker without work waits ``IDLE`` seconds for the next sweep, since starting one costs 3 s, and then ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from loky import ProcessPoolExecutor, cpu_count

from ..config import RunConfig
from ..records.files import ROOT
from ..records.store import Store
from ..training.launcher import THREADS
from .worker import Unit, start_worker, work

IDLE = 20.0  # seconds
GRACE = 10.0  # seconds for the workers of an executor to end their runs

GPUS = "CUDA_VISIBLE_DEVICES"

LOST = (Exception, asyncio.CancelledError)  # what a future may raise when its worker is gone


def slot_environments(runs: Sequence[RunConfig]) -> list[dict[str, str]]:
    """Return the environment of each worker that this machine has room for: one per GPU, or cores / threads of them."""
    threads = max((run.threads for run in runs), default=1)
    environment = dict.fromkeys(THREADS, str(threads))
    if any(run.device == "cuda" for run in runs):
        visible = os.environ.get(GPUS)
        names = visible.split(",") if visible else map(str, range(torch.cuda.device_count()))
        return [environment | {GPUS: name} for name in names]
    return [environment] * max(1, cpu_count() // threads)


class Here:
    """This process, one run at a time; ``submit`` returns when the run has ended."""

    verb = "run"

    def __init__(self) -> None:
        self.tick: Callable[[], None] = lambda: None  # called at each step

    def fits(self, run: RunConfig, running: int) -> bool:
        """Return whether a run may start now."""
        return running == 0

    def submit(self, run: RunConfig, unit: Unit) -> Any:
        """Return a future that is already done, with what ``work`` returns."""
        future: concurrent.futures.Future[Unit] = concurrent.futures.Future()
        future.set_result(work(unit, self.tick))
        return future

    def wait(self, futures: Sequence[Any], seconds: float) -> list[Any]:
        """Return the futures that are done."""
        return list(futures)

    def ended(self, future: Any, *, died: bool) -> None:
        """Note that a run is over."""

    def stop(self, futures: Sequence[tuple[Any, Unit]], store: Store) -> None:
        """Stop what still runs."""

    def close(self) -> None:
        """Release the workers after a sweep that went to its end."""


class _Slot:
    """Room for one worker process, started when it is needed, and again after it died or was idle for long."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.stamps: dict[str, int] = {}  # when the code that it may have loaded was changed
        self.pool: ProcessPoolExecutor | None = None

    def suits(self, environment: dict[str, str], stamps: dict[str, int]) -> bool:
        """Return whether this worker would do the same as a new one."""
        return self.environment == environment and all(self.stamps.get(p, t) == t for p, t in stamps.items())

    def submit(self, unit: Unit) -> Any:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(
                max_workers=1, env=self.environment, initializer=start_worker, initargs=(os.getpid(),)
            )
        return self.pool.submit(work, unit)

    def kill(self) -> None:
        """End the worker process, also in the middle of a run."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, kill_workers=True)
            self.pool = None


_warm: list[_Slot] = []  # of earlier sweeps
_warm_lock = threading.Lock()


class Slots(Here):
    """One worker process a slot; a run takes as many slots as it has ranks."""

    verb = "worker process"

    def __init__(self, environments: Sequence[dict[str, str]], runs: Sequence[RunConfig]) -> None:
        super().__init__()
        stamps = _stamps(runs)
        with _warm_lock:
            self.free = [_take(environment, stamps) for environment in environments]
        close_idle()  # the others would stay beside the new ones
        self.total = len(self.free)
        self.taken: dict[Any, list[_Slot]] = {}

    def _needs(self, run: RunConfig) -> int:
        return min(run.ranks, self.total)

    def fits(self, run: RunConfig, running: int) -> bool:
        """Return whether enough slots are free for the run."""
        return self._needs(run) <= len(self.free)

    def submit(self, run: RunConfig, unit: Unit) -> Any:
        """Start a run in its slots and return a future of what ``work`` returns."""
        slots = [self.free.pop() for _ in range(self._needs(run))]
        devices = [slot.environment[GPUS] for slot in slots if GPUS in slot.environment]
        future = slots[0].submit(unit | ({"devices": ",".join(devices)} if devices else {}))
        self.taken[future] = slots
        return future

    def wait(self, futures: Sequence[Any], seconds: float) -> list[Any]:
        """Return the futures that are done, after at most ``seconds``."""
        return list(concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_COMPLETED).done)

    def ended(self, future: Any, *, died: bool) -> None:
        """Free the slots of a run."""
        slots = self.taken.pop(future)
        if died:
            for slot in slots:
                slot.kill()
        self.free += slots

    def stop(self, futures: Sequence[tuple[Any, Unit]], store: Store) -> None:
        """Kill all workers."""
        for slots in (self.free, *self.taken.values()):
            for slot in slots:
                slot.kill()

    def close(self) -> None:
        """Keep the workers for a while, for the next sweep."""
        with _warm_lock:
            _warm.extend(self.free)
        timer = threading.Timer(IDLE, close_idle)
        timer.daemon = True
        timer.start()


def close_idle() -> None:
    """End the workers that wait for another sweep."""
    with _warm_lock:
        while _warm:
            _warm.pop().kill()


def _take(environment: dict[str, str], stamps: dict[str, int]) -> _Slot:
    slot = next((slot for slot in _warm if slot.suits(environment, stamps)), None)
    if slot is None:
        slot = _Slot(environment)
    else:
        _warm.remove(slot)
    slot.stamps |= stamps
    return slot


def _stamps(runs: Sequence[RunConfig]) -> dict[str, int]:
    """Return when each file of this package and of the runs' factories was changed; workers may have older code."""
    factories = [name for run in runs for part in (run.model, run.optimizer) if (name := getattr(part, "name", None))]
    modules = {sys.modules.get(name.partition(":")[0]) for name in factories}
    files = {Path(file) for module in modules if (file := getattr(module, "__file__", None))}
    files |= set((ROOT / "sandbox").rglob("*.py"))
    return {str(path): path.stat().st_mtime_ns for path in files if path.exists()}


class Foreign(Here):
    """Any object whose ``submit(function, argument)`` returns something with ``done``, ``result`` and ``cancel``."""

    verb = "executor"

    def __init__(self, executor: Any, workers: int | None) -> None:
        super().__init__()
        self.executor, self.workers = executor, workers

    def fits(self, run: RunConfig, running: int) -> bool:
        """Return whether one more may be submitted; without ``workers`` the executor's queue takes all."""
        return self.workers is None or running < self.workers

    def submit(self, run: RunConfig, unit: Unit) -> Any:
        """Return the executor's future of what ``work`` returns."""
        return self.executor.submit(work, unit)

    def wait(self, futures: Sequence[Any], seconds: float) -> list[Any]:
        """Return the futures that are done, after at most ``seconds``."""
        if all(isinstance(future, concurrent.futures.Future) for future in futures):
            return list(concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_COMPLETED).done)
        deadline = time.monotonic() + seconds
        while not (done := [future for future in futures if future.done()]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return done

    def stop(self, futures: Sequence[tuple[Any, Unit]], store: Store) -> None:
        """Cancel what has not started, ask the rest to end by the store, and wait a little for it."""
        for future, unit in futures:
            store.stop(unit["hash"], unit["token"])
            with contextlib.suppress(*LOST):
                future.cancel()
        left, deadline = list(futures), time.monotonic() + GRACE
        while left and time.monotonic() < deadline:
            self.wait([future for future, _ in left], 0.2)
            # Dask says "cancelled" of a task that its worker still runs, so ask for the claim.
            left = [(f, u) for f, u in left if not f.done() or store.holds(u["hash"], u["token"])]
