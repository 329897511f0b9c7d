"""What comes back from a pool or appears in the store: each run gets one record, whatever happened to its worker."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from typing import Any

from ..config import RunConfig
from ..records import RunRecord, Store
from .display import EVERY
from .executors import LOST, Here, Slots
from .saving import Saver
from .worker import Unit, ended, fresh_answer

PATIENCE = 90.0  # seconds; NFS clients may believe for 60 that a file is not there (nfs(5), acdirmax)


@dataclass
class Work:
    """The runs of a sweep that have no record yet."""

    runs: Mapping[str, RunConfig]  # by hash
    seen: Mapping[str, int | None]  # version of the record that each run replaces
    queue: deque[str]  # hashes of runs that wait
    running: dict[Any, Unit] = field(default_factory=dict)  # future -> what was submitted
    elsewhere: dict[str, Unit] = field(default_factory=dict)  # runs that another sweep has claimed

    def __bool__(self) -> bool:
        return bool(self.queue or self.running or self.elsewhere)


class Intake:
    """Turns finished futures, dead workers and the work of other sweeps into records."""

    def __init__(self, work: Work, store: Store, pool: Here, saver: Saver) -> None:
        self.work, self.store, self.pool, self.saver = work, store, pool, saver
        self._strikes: dict[str, int] = {}  # hash -> how many futures failed before the run began
        self._patience: dict[str, float] = {}  # hash -> until when a written record may still become visible here
        self._looked = 0.0

    def take(self, future: Any) -> Iterator[RunRecord]:
        """Yield the record of a future that is done, unless there is none yet."""
        unit = self.work.running.pop(future)
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
            self.saver.save(record)
            yield record
            return
        found = self.store.load(name) if self.store.version(name) != unit["seen"] else None
        if found is None or answer["status"] == "elsewhere":
            self.work.elsewhere[name] = unit
            if answer["status"] not in ("elsewhere", "interrupted"):
                self._patience[name] = time.monotonic() + PATIENCE
        elif found.status == "interrupted":  # by the stop of another sweep, or of a preempted job
            self.work.queue.append(name)
        else:
            yield found

    def _lost(self, unit: Unit, error: BaseException) -> Iterator[RunRecord]:
        """Yield the record of a run whose worker is gone. A run that never began is submitted once more."""
        name, run = unit["hash"], self.work.runs[unit["hash"]]
        began = self.store.void(name, unit["token"]) or isinstance(self.pool, Slots)
        if (found := fresh_answer(self.store, name, run, unit["seen"])) is not None:
            yield found
            return
        self._strikes[name] = self._strikes.get(name, 0) + 1
        if not began and self._strikes[name] < 2:
            self.work.queue.append(name)
            return
        what = "died" if isinstance(error, BrokenExecutor) else "failed"
        record = ended(run, "failed", f"the {self.pool.verb} {what}: {type(error).__name__}: {error}")
        self.saver.save(record)
        yield record

    def look_elsewhere(self) -> Iterator[RunRecord]:
        """Yield records that other sweeps made, and queue the runs that they gave up."""
        now = time.monotonic()
        if now - self._looked < EVERY / 2:
            return
        self._looked = now
        for name, unit in list(self.work.elsewhere.items()):
            found = fresh_answer(self.store, name, self.work.runs[name], unit["seen"])
            if found is not None:
                del self.work.elsewhere[name]
                yield found
            elif not self.store.held(name) and now > self._patience.get(name, 0):
                del self.work.elsewhere[name]
                self.work.queue.append(name)
