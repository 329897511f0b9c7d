"""What an executor runs: ``work``, one run from its claim to its record.

Plain dicts go in and out, and results are on disk. The process that holds the claim trains: the process of a slot, a
Dask worker, a Slurm job, or this one. It renews the claim, writes down its progress, and ends the run at the next step
when it is asked to stop.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from ..config import RunConfig
from ..records.claims import BEAT, Claim
from ..records.record import RunRecord, Status
from ..records.store import Store
from ..training.environment import identity
from ..training.launcher import launch
from ..training.loop import train, try_train

POINTS = 200  # at most, of a running curve in its progress file

Unit = dict[str, Any]

_turn = threading.Lock()  # a process has one generator and one thread count: runs in its threads take turns
_at_work: list[_Shift] = []  # read by the thread that watches the parent


class _Stopped(BaseException):
    """Ends a run from inside. It is a BaseException, so that a model's ``except Exception`` does not catch it."""


def stands(record: RunRecord, run: RunConfig, retry: Iterable[str] = ()) -> bool:
    """Return whether a stored record is still the answer, so that the run is not trained again.

    It is not if the run was interrupted, if its status is in ``retry``, or if the corpus, the backend or
    ``NUMERICS_VERSION`` has changed.
    """
    if record.status == "interrupted" or record.status in retry:
        return False
    return all(record.environment.get(key) == value for key, value in known_identity(run).items())


def fresh_answer(store: Store, name: str, run: RunConfig, seen: int | None) -> RunRecord | None:
    """Return the record of a run if it was written after version ``seen`` and stands, else None."""
    record = store.load(name) if store.version(name) != seen else None
    return record if record is not None and stands(record, run) else None


def known_identity(run: RunConfig) -> dict[str, Any]:
    """Return ``environment.identity``; an empty dict if it cannot be found, so that the record stands."""
    try:
        return identity(run)
    except Exception:  # the corpus or the backend is gone: no new run could replace the record either
        return {}


def ended(run: RunConfig, status: Status, error: str) -> RunRecord:
    """Return the record of a run that left none itself."""
    return RunRecord(config=run, hash=run.hash, status=status, error=error, environment=known_identity(run))


def unit_of(run: RunConfig, name: str, store: Store, seen: int | None = None) -> Unit:
    """Return what a worker gets for a run: its config, the store, and the version of the record that it replaces."""
    return {
        "run": run.to_dict(),
        "hash": name,
        "store": str(store.folder),
        "token": uuid.uuid4().hex,
        "seen": seen,
    }


def work(unit: Unit, on_row: Callable[[], None] | None = None) -> Unit:
    """Train the run of a unit, and return its ``hash`` and, as ``status``, how it ended.

    ``elsewhere``: somebody else holds the claim. ``stored``: a record has appeared meanwhile. ``interrupted``: it was
    asked to stop. Otherwise the record's status. The record is on disk; if the store cannot be reached from here or its
    disk is full, it is returned as ``record``.
    """
    run, store, name = RunConfig.from_dict(unit["run"]), Store(unit["store"]), unit["hash"]
    with _turn:
        try:
            claim = store.claim(name, unit["token"])
        except OSError:  # the disk is not shared, or full: train without a claim
            return {"hash": name, "status": "", "record": _train(run, None, unit).to_dict()}
        if claim is None:
            return {"hash": name, "status": "elsewhere"}
        shift = _Shift(claim, store, run, on_row)
        try:
            return shift.work(unit)
        finally:
            shift.close()


def _train(run: RunConfig, on_step: Callable[[dict[str, float]], None] | None, unit: Unit) -> RunRecord:
    several = functools.partial(launch, devices=unit.get("devices"), progress=False)
    record = try_train(run, on_step, how=train if run.ranks == 1 else several)
    return ended(run, "failed", record.error or "") if record.status == "failed" else record


class _Shift:
    """One claimed run. A thread renews the claim; the training thread asks it whether to go on."""

    def __init__(self, claim: Claim, store: Store, run: RunConfig, on_row: Callable[[], None] | None) -> None:
        self.claim, self.store, self.run, self.on_row = claim, store, run, on_row
        self.rows: list[dict[str, float]] = []
        self.reason: str | None = None  # why to stop
        self.over = threading.Event()
        self.writing = threading.Lock()  # so that either the run or an interruption writes the record
        self.start = time.monotonic()
        self.beat = threading.Thread(target=self._beat, name="sandbox-claim", daemon=True)
        self.beat.start()
        _at_work.append(self)

    def work(self, unit: Unit) -> Unit:
        """Train, unless a record has appeared since the unit was made, and return what ``work`` returns."""
        store, name = self.store, unit["hash"]
        if self.claim.stopped():  # before it began: the job waited in a queue until its sweep was gone
            return {"hash": name, "status": "interrupted"}
        if fresh_answer(store, name, self.run, unit["seen"]) is not None:
            return {"hash": name, "status": "stored"}
        try:
            record = _train(self.run, self._on_step, unit)
        except BaseException as error:
            reason = self.reason or type(error).__name__
            if reason == "lost":
                return {"hash": name, "status": "elsewhere"}
            self.interrupt(f"stopped by {reason}")
            if isinstance(error, _Stopped):
                return {"hash": name, "status": "interrupted"}
            raise
        with self.writing:
            self.over.set()
            try:
                store.save(record)
            except OSError:  # the disk is full; the caller may have room, or try later
                return {"hash": name, "status": record.status, "record": record.to_dict()}
        return {"hash": name, "status": record.status}

    def interrupt(self, reason: str) -> None:
        """Write a record that says so, unless there is one already, and give the claim up."""
        with self.writing:
            if not self.over.is_set():
                self.over.set()
                with contextlib.suppress(OSError):  # a run without a record is run again anyway
                    self.store.save(ended(self.run, "interrupted", reason))
                self.claim.release()

    def close(self) -> None:
        """End the thread and give the claim up."""
        _at_work.remove(self)
        self.over.set()
        self.beat.join()
        self.claim.release()

    def _on_step(self, row: dict[str, float]) -> None:
        self.rows.append(row)
        if self.on_row is not None:
            self.on_row()
        if self.reason is not None:
            raise _Stopped

    def _beat(self) -> None:
        while not self.over.wait(BEAT):
            try:
                if self.claim.stopped():
                    self.reason = "its sweep"
                elif not self.claim.mine():
                    self.reason = "lost"
                else:
                    self.claim.touch(self._progress())
            except OSError:  # the disk is full or the file server away; the next beat may succeed
                continue

    def _progress(self) -> dict[str, Any]:
        rows = self.rows[:]
        last = rows[-1] if rows else {"step": 0, "tokens": 0}
        some = rows[:: len(rows) // POINTS + 1]
        return {
            "step": last["step"],
            "steps": self.run.steps,
            "tokens": last["tokens"],
            "seconds": time.monotonic() - self.start,
            "curve": {key: [row[key] for row in some] for key in ("step", "train_loss")},
        }


def start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end when the parent is gone, as after a killed kernel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger(__package__).setLevel(logging.ERROR)  # no message on the groups from each worker

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(BEAT)
        for shift in list(_at_work):
            shift.interrupt("stopped by the end of its parent process")
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
