"""``sweep`` trains the runs that the store does not hold yet, in parallel, and loses none that finished.

Runs are handed to a pool (``executors``), trained by its workers (``worker``), and kept in a store (``records.store``).
Several sweeps may share a store: when one of them has claimed a run, the others wait for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..fields import near
from ..records.files import home
from ..records.record import RunRecord
from ..records.store import Store, report
from ..training.loop import check_device
from .display import Display
from .driver import Driver
from .executors import Foreign, Here, Slots, slot_environments
from .worker import stands

OnRecord = Callable[[RunRecord], None]

RETRIED = ("failed", "diverged", "interrupted")


def sweep(
    runs: Sequence[RunConfig],
    store: str | Path = "runs",
    *,
    workers: int | None = None,
    executor: Any = None,
    retry: Iterable[str] = (),
    watch: bool = False,
    on_record: OnRecord | None = None,
    progress: bool = True,
) -> list[RunRecord]:
    """Return the records of ``runs``, in their order; those that the store already holds are not run again.

    A stored run counts if it finished, diverged or failed, and if its corpus hash, backend and ``NUMERICS_VERSION`` are
    still the same. ``retry`` names statuses that are run again all the same. A run that was interrupted is always run
    again, from its first step. Each record is written as soon as its run ends. If another sweep on the same store is
    training a run, this one waits for it. Ctrl-C and SIGTERM stop what runs within seconds, and the same call goes on
    from there.

    Args:
        runs: what to train; equal runs are trained once.
        store: folder of runs; a relative one is under ``records.files.home()``.
        workers: the most runs at a time; None: as many as there is room for (``executors.slot_environments``), or all
            at once where an executor has its own queue. With room for one, runs are trained in this process.
        executor: anything whose ``submit(function, argument)`` returns something with ``done``, ``result`` and
            ``cancel``: of ``concurrent.futures`` (processes: by spawn), Dask's ``client.get_executor(pure=False)``, of
            submitit. None: local slots.
        retry: statuses to run again: "failed", "diverged"; "interrupted" always is.
        watch: show a table and curves that update in place in a notebook, a line a run elsewhere.
        on_record: called in this process with each new record; it only observes.
        progress: show one bar.

    Raises:
        ValueError: workers below 1, a status that cannot be retried, or ``device="cuda"`` where there is no GPU.
        RuntimeError: the executor refuses a run although none is running; finished runs are kept.
    """
    retry = [retry] if isinstance(retry, str) else list(retry)
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} was given; allowed is at least 1")
    for status in retry:
        if status not in RETRIED:
            raise ValueError(f"retry={status!r} was given: {near(str(status), RETRIED)}")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ValueError(f"executor={executor!r} was given; allowed is an object with a method submit")
    shelf = Store(home() / store)
    unique = {run.hash: run for run in (run.resolved() for run in runs)}
    seen = {name: shelf.version(name) for name in unique}  # before they are read, so that a later one is seen as new
    stored = {name: shelf.load(name) for name in unique}
    records = {name: r for name, r in stored.items() if r is not None and stands(r, unique[name], retry)}
    _tell_kept(records)
    pending = {name: run for name, run in unique.items() if name not in records}
    pool = _pool(list(pending.values()), executor, workers)
    display = Display(unique, records, shelf, bar=progress and bool(pending), watch=watch and bool(pending))
    driver = Driver(pending, seen, shelf, pool, display)
    with _sigterm_unwinds(), contextlib.closing(display), contextlib.closing(driver.records()) as ended:
        for record in ended:  # an error below stops the workers too
            records[record.hash] = record
            display.ended(record)
            if on_record is not None:
                on_record(record)
    return [records[run.hash] for run in runs]


def _tell_kept(records: Mapping[str, RunRecord]) -> None:
    failed = sum(record.status == "failed" for record in records.values())
    if failed:
        report(f"{failed} failed before and {'is' if failed == 1 else 'are'} kept; retry=['failed'] runs such again")


def _pool(runs: Sequence[RunConfig], executor: Any, workers: int | None) -> Here:
    """Return where to work: the executor given, several slots if there is room, else this process."""
    if executor is not None:
        return Foreign(executor, workers)
    for run in runs:
        check_device(run)
    environments = slot_environments(runs)[:workers][: len(runs)]
    return Slots(environments, runs) if len(environments) > 1 else Here()


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Make SIGTERM raise an exception, so that workers are stopped before it ends this process."""
    came = []

    def leave(number: int, frame: Any) -> None:
        came.append(number)
        raise SystemExit(128 + number)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)  # a notebook's kernel would survive the SystemExit
