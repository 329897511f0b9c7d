"""The loop under ``sweep``: hands runs to a pool, takes records in (``intake``), and ends all workers when it ends.

Each run gets one record, and a record that was written is never lost, whatever happens to a worker, an executor or a
disk.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping

from ..config import RunConfig
from ..records import RunRecord, Store
from .display import EVERY, Display
from .executors import Here
from .intake import Intake, Work
from .saving import Saver
from .worker import Unit, ended, unit_of


class Driver:
    """Hands the runs of a sweep to a pool until each has a record."""

    def __init__(
        self, runs: Mapping[str, RunConfig], seen: Mapping[str, int | None], store: Store, pool: Here, display: Display
    ) -> None:
        self.store, self.pool, self.display = store, pool, display
        self.work = Work(runs, seen, deque(runs))
        self.saver = Saver(store)
        self.intake = Intake(self.work, store, pool, self.saver)
        self.starting: list[str] = []  # what is being submitted: in this process, what is being trained
        pool.tick = self._tick

    def records(self) -> Generator[RunRecord, None, None]:
        """Yield records in the order in which runs end. When this loop ends, for whatever reason, no run goes on."""
        whole = False
        try:
            while self.work:
                self._submit()
                self._tick()
                running = list(self.work.running)
                for future in self.pool.wait(running, EVERY) if running else ():
                    yield from self.intake.take(future)
                yield from self.intake.look_elsewhere()
                if self.work.elsewhere and not self.work.running:
                    time.sleep(EVERY / 2)
            whole = True
        finally:
            self._close(whole)

    def _tick(self) -> None:
        self.display.tick([*self.starting, *(unit["hash"] for unit in self.work.running.values())])

    def _submit(self) -> None:
        """Submit as many runs as the pool takes, except those that another sweep is training."""
        work = self.work
        for _ in range(len(work.queue)):
            name = work.queue[0]
            if not self.pool.fits(work.runs[name], len(work.running)):
                return
            unit = unit_of(work.runs[name], name, self.store, work.seen[name])
            if self.store.held(name):
                work.elsewhere[name] = unit
            else:
                with contextlib.suppress(OSError):  # full or read-only: the worker finds no folder and sends the record
                    self.store.room(name).mkdir(parents=True, exist_ok=True)
                if not self._hand_over(name, unit):
                    return
            work.queue.popleft()

    def _hand_over(self, name: str, unit: Unit) -> bool:
        """Return whether the pool took the run. If its queue is full, it is tried again once another run has ended."""
        self.starting = [name]
        try:
            self.work.running[self.pool.submit(self.work.runs[name], unit)] = unit
        except Exception as error:
            if self.work.running:
                return False
            why = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"the {self.pool.verb} refused run {name}: {why}; what finished is kept") from error
        finally:
            self.starting = []
        return True

    def _close(self, whole: bool) -> None:
        """Let the workers go, or stop them and note which runs they were training."""
        if whole:
            self.pool.close()
        else:
            running = self.work.running
            with _deaf_to_ctrl_c():
                self.pool.stop(list(running.items()), self.store)
            for unit in running.values():
                name = unit["hash"]
                if self.store.void(name, unit["token"]) and self.store.version(name) == unit["seen"]:
                    self.saver.save(ended(self.work.runs[name], "interrupted", "its sweep was stopped"))
        self.saver.close()


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Ignore a second, impatient Ctrl-C while the workers are stopped, which takes seconds."""
    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ours else None
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)
