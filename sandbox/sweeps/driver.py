"""The loop under ``sweep``: hands runs to a pool, takes records from the store, waits for what others train.

Whatever happens to a worker, an executor or a disk, each run gets one record, and one that was written is never lost.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import BrokenExecutor
from typing import Any

from ..config import RunConfig
from ..records.record import RunRecord
from ..records.store import Store, report
from .display import EVERY, Display
from .executors import LOST, Here, Slots
from .worker import Unit, ended, stands, unit_of

PATIENCE = 90.0  # seconds; NFS clients may believe for 60 that a file is not there (nfs(5), acdirmax)


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Let a second, impatient Ctrl-C not keep workers from being stopped, which takes seconds."""
    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ours else None
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)


class Driver:
    """Hands runs to a pool, takes records from the store, and waits for what other sweeps are training."""

    def __init__(
        self, runs: Mapping[str, RunConfig], seen: Mapping[str, int | None], store: Store, pool: Here, display: Display
    ) -> None:
        self.runs, self.seen, self.store, self.pool, self.display = runs, seen, store, pool, display
        self.queue = deque(runs)  # hashes
        self.running: dict[Any, Unit] = {}  # future -> what was submitted
        self.starting: list[str] = []  # what is being submitted: in this process, what is being trained
        self.elsewhere: dict[str, Unit] = {}  # another sweep's claim holds
        self.unsaved: dict[str, RunRecord] = {}  # ended, but the disk was full
        self.told: set[str] = set()  # of those
        self.patience: dict[str, float] = {}  # until when a record that was written may still become visible here
        self.looked = 0.0
        self.strikes: dict[str, int] = {}  # futures that failed before their run began
        pool.tick = self._tick

    def records(self) -> Iterator[RunRecord]:
        """Yield records in the order in which runs end; whatever ends this loop, no run outlives it."""
        whole = False
        try:
            while self.queue or self.running or self.elsewhere:
                self._submit()
                self._tick()
                for future in self.pool.wait(list(self.running), EVERY) if self.running else ():
                    yield from self._take(future)
                yield from self._look_elsewhere()
                if self.elsewhere and not self.running:
                    time.sleep(EVERY / 2)
            whole = True
        finally:
            self._close(whole)

    def _tick(self) -> None:
        self.display.tick([*self.starting, *(unit["hash"] for unit in self.running.values())])

    def _submit(self) -> None:
        """Submit what fits, but for runs that another sweep is training."""
        for _ in range(len(self.queue)):
            name = self.queue[0]
            if not self.pool.fits(self.runs[name], len(self.running)):
                return
            unit = unit_of(self.runs[name], name, self.store, self.seen[name])
            if self.store.held(name):
                self.elsewhere[name] = unit
            else:
                with contextlib.suppress(OSError):  # full or read-only: the worker finds no folder and sends the record
                    self.store.room(name).mkdir(parents=True, exist_ok=True)
                if not self._hand_over(name, unit):
                    return
            self.queue.popleft()

    def _hand_over(self, name: str, unit: Unit) -> bool:
        """Return whether the pool took the run; a full queue is tried again once something ended."""
        self.starting = [name]
        try:
            self.running[self.pool.submit(self.runs[name], unit)] = unit
        except Exception as error:
            if self.running:
                return False
            why = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"the {self.pool.verb} refused run {name}: {why}; what finished is kept") from error
        finally:
            self.starting = []
        return True

    def _take(self, future: Any) -> Iterator[RunRecord]:
        """Yield the record of a future that is done, unless there is none yet."""
        unit = self.running.pop(future)
        name = unit["hash"]
        try:
            answer = future.result()
        except LOST as error:  # the worker died: killed, out of memory, a crash in C
            self.pool.ended(future, died=True)
            yield from self._lost(unit, error)
            return
        self.pool.ended(future, died=False)
        if "record" in answer:
            record = RunRecord.from_dict(answer["record"])
            self._save(record)
            yield record
            return
        record = self.store.load(name) if self.store.version(name) != unit["seen"] else None
        if record is None or answer["status"] == "elsewhere":
            self.elsewhere[name] = unit
            if answer["status"] not in ("elsewhere", "interrupted"):
                self.patience[name] = time.monotonic() + PATIENCE
        elif record.status == "interrupted":  # another sweep's stop, or a preempted job
            self.queue.append(name)
        else:
            yield record

    def _lost(self, unit: Unit, error: BaseException) -> Iterator[RunRecord]:
        """Yield the record of a run whose worker is gone; one that never began is submitted once more."""
        name = unit["hash"]
        began = self.store.void(name, unit["token"]) or isinstance(self.pool, Slots)
        if self.store.version(name) != unit["seen"] and stands(record := self.store.load(name), self.runs[name]):
            yield record
            return
        self.strikes[name] = self.strikes.get(name, 0) + 1
        if not began and self.strikes[name] < 2:
            self.queue.append(name)
            return
        what = "died" if isinstance(error, BrokenExecutor) else "failed"
        reason = f"the {self.pool.verb} {what}: {type(error).__name__}: {error}"
        record = ended(self.runs[name], "failed", reason)
        self._save(record)
        yield record

    def _look_elsewhere(self) -> Iterator[RunRecord]:
        """Yield records that other sweeps made; take over what they left."""
        now = time.monotonic()
        if now - self.looked < EVERY / 2:
            return
        self.looked = now
        for name, unit in list(self.elsewhere.items()):
            if self.store.version(name) != unit["seen"] and stands(record := self.store.load(name), self.runs[name]):
                del self.elsewhere[name]
                yield record
            elif not self.store.held(name) and now > self.patience.get(name, 0):
                del self.elsewhere[name]
                self.queue.append(name)

    def _save(self, record: RunRecord) -> None:
        """Write a record, and those that could not be written before."""
        self.unsaved[record.hash] = record
        for name, waiting in list(self.unsaved.items()):
            try:
                self.store.save(waiting)
                del self.unsaved[name]
            except OSError as error:
                if name not in self.told:
                    report(f"the record of {name} could not be written ({error}); it is kept in memory and tried again")
                self.told.add(name)

    def _close(self, whole: bool) -> None:
        """Let the workers go, or stop them and note what they were at."""
        if whole:
            self.pool.close()
        else:
            with _deaf_to_ctrl_c():
                self.pool.stop(list(self.running.items()), self.store)
            for unit in self.running.values():
                if self.store.void(unit["hash"], unit["token"]) and self.store.version(unit["hash"]) == unit["seen"]:
                    self._save(ended(self.runs[unit["hash"]], "interrupted", "its sweep was stopped"))
        for record in list(self.unsaved.values())[:1]:
            self._save(record)
        if self.unsaved:
            report(f"{len(self.unsaved)} records are in memory only, in what this sweep returns")
