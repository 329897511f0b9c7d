"""Many runs: ``grid`` makes them, ``sweep`` trains those that the store does not hold yet, in parallel, losing nothing.

Each slot is a loky pool of one worker, since a worker that dies takes its whole pool along: here that costs one run.
Workers start afresh (no fork: CUDA may have been touched) and get their thread count and their GPU through the
environment, before they import torch: threads beyond the cores spin at barriers and made a 50 ms step take 2,000 ms.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import torch
from loky import ProcessPoolExecutor, cpu_count
from tqdm.auto import tqdm

from .config import RunConfig
from .environment import identity
from .fields import with_field
from .record import RunRecord, home
from .train import try_train

OnRecord = Callable[[RunRecord], None]

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def grid(base: RunConfig, **axes: Iterable[Any]) -> list[RunConfig]:
    """Return one run for each combination of the axes' values, the last axis fastest.

    Axes are dotted fields: ``grid(base, **{"optimizer.lm_head_lr": [1e-3, 1e-2], "seed": [0, 1]})``.

    Raises:
        ValueError: a field that does not exist, with near names, or a value that it does not allow.
    """
    for name, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"axis {name}={values!r} was given; allowed is a list of values")
    axes = {name: list(values) for name, values in axes.items()}
    runs = []
    for values in itertools.product(*axes.values()):
        run = base
        for name, value in zip(axes, values, strict=True):
            run = with_field(run, name, value)
        runs.append(run)
    return runs


def sweep(
    runs: Sequence[RunConfig],
    store: str | Path = "runs",
    *,
    workers: int | None = None,
    on_record: OnRecord | None = None,
    progress: bool = True,
) -> list[RunRecord]:
    """Return the records of ``runs``, in their order; those that the store already holds are not run again.

    A stored run counts if it finished or diverged and its corpus hash, backend and ``NUMERICS_VERSION`` are those that
    it would have now. Every record is written as soon as its run ends. A run that raises or whose worker dies becomes
    a record with status ``failed``, which a later call tries again.

    Args:
        runs: what to train; equal runs are trained once.
        store: folder of ``<hash>.json`` files; a relative one lies under ``record.home()``.
        workers: at most so many processes; None: as many as there is room for (``slot_environments``). With room for
            one, runs are trained in this process.
        on_record: called with each new record; it observes only.
        progress: show one bar.

    Raises:
        ValueError: workers below 1.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} was given; allowed is at least 1")
    folder = home() / store
    unique = {run.hash: run for run in (run.resolved() for run in runs)}
    records = {name: stored for name, run in unique.items() if (stored := _stored(folder, run)) is not None}
    pending = [run for name, run in unique.items() if name not in records]
    with (
        tqdm(total=len(unique), initial=len(records), unit="run", disable=not (progress and pending)) as bar,
        contextlib.closing(_train_all(pending, workers)) as finished,  # an error below ends the workers too
    ):
        for record in finished:
            record.save(folder)
            records[record.hash] = record
            bar.update()
            bar.set_postfix_str(f"last {record.status}, {record.val_loss:.3f} nats/token")
            if on_record is not None:
                on_record(record)
    return [records[run.hash] for run in runs]


def _stored(folder: Path, run: RunConfig) -> RunRecord | None:
    """Return the stored record where it still says what the run would give; an unreadable file is put aside."""
    path = folder / f"{run.hash}.json"
    if not path.exists():
        return None
    try:
        record = RunRecord.load(path)
    except ValueError as error:
        aside = path.with_suffix(f".unreadable-{time.time_ns()}")
        path.rename(aside)
        tqdm.write(f"{error}; it was put aside as {aside.name} and its run starts again", file=sys.stderr)
        return None
    if record.status not in ("finished", "diverged"):
        return None
    try:
        now = identity(run)
    except (OSError, ValueError):  # the corpus is gone: nothing speaks against the record, and no run could replace it
        return record
    return record if all(record.environment.get(key) == value for key, value in now.items()) else None


def _train_all(runs: Sequence[RunConfig], workers: int | None) -> Iterator[RunRecord]:
    """Yield a record of each run as it ends: from slots where more than one pays, else from this process."""
    slots = [_Slot(environment) for environment in slot_environments(runs)[:workers][: len(runs)]]
    if len(slots) > 1:
        yield from _train_in_slots(runs, slots)
    else:
        yield from map(try_train, runs)


def slot_environments(runs: Sequence[RunConfig]) -> list[dict[str, str]]:
    """Return the environment of each worker that this machine has room for: one a GPU, or slots x threads <= cores."""
    threads = max((run.threads for run in runs), default=1)
    environment = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    if any(run.device == "cuda" for run in runs):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else map(str, range(torch.cuda.device_count()))
        return [environment | {"CUDA_VISIBLE_DEVICES": name} for name in names]
    return [environment] * max(1, cpu_count() // threads)


class _Slot:
    """Room for one worker process, started when first needed and anew after it died."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.pool: ProcessPoolExecutor | None = None

    def submit(self, run: RunConfig) -> Future[dict[str, Any]]:
        """Start a run and return the future of its record as a dict."""
        if self.pool is None:
            self.pool = ProcessPoolExecutor(
                max_workers=1, env=self.environment, initializer=_start_worker, initargs=(os.getpid(),)
            )
        return self.pool.submit(_work, run.to_dict())

    def close(self) -> None:
        """End the worker process, also in the middle of a run."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, kill_workers=True)
            self.pool = None


def _train_in_slots(runs: Sequence[RunConfig], slots: Sequence[_Slot]) -> Iterator[RunRecord]:
    """Yield records in the order in which they end; whatever ends this loop, no worker outlives it."""
    queue, free = deque(runs), list(slots)
    running: dict[Future[dict[str, Any]], tuple[_Slot, RunConfig]] = {}
    try:
        while queue or running:
            while queue and free:
                slot, run = free.pop(), queue.popleft()
                running[slot.submit(run)] = slot, run
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                slot, run = running.pop(future)
                try:
                    record = RunRecord.from_dict(future.result())
                except Exception as error:  # the worker died: killed, out of memory, a crash in C
                    slot.close()
                    reason = f"the worker process died: {type(error).__name__}: {error}"
                    record = RunRecord(config=run, hash=run.hash, status="failed", error=reason)
                free.append(slot)
                yield record
    finally:
        for slot in slots:
            slot.close()


def _work(run: dict[str, Any]) -> dict[str, Any]:
    """Train in a worker: plain dicts travel both ways."""
    return try_train(RunConfig.from_dict(run)).to_dict()


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end where the parent is gone (a killed kernel cannot say good-bye)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger(__package__).setLevel(logging.ERROR)  # a remark on the groups once a worker is noise

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
