"""The store: a folder a run, named by its hash, in which its record appears whole or not at all, and at most one claim.

``<store>/<hash>/record.json`` is what the run left, ``claim`` says who trains it now, ``progress.json`` how far it is.
Notebooks, processes and the nodes of a cluster may share one store, also over NFS: a claim is made with ``link``, which
is exclusive there too (open(2), on O_EXCL), its age is read off the file server's own clock, and nothing is locked.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from .record import RunRecord, home, record_path, write_atomic

BEAT = 1.0  # seconds between two touches of a claim
EXPIRY = 120.0  # seconds without a touch that void a claim; NFS clients may show attributes 60 s old (nfs(5), acregmax)

_held_here: set[str] = set()  # tokens of this process's claims


def report(sentence: str) -> None:
    """Write one line to stderr, above a progress bar where there is one."""
    tqdm.write(sentence, file=sys.stderr)


@functools.cache
def place() -> str:
    """Return what processes share that can see each other by number: host, boot and namespace of process ids."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):  # Linux only
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot (proc(5)); None where it is gone or cannot be told."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    return None


def _alive(pid: int, started: str | None) -> bool:
    """Return whether that process still runs; a number that another process got since does not count."""
    if started is not None:
        return _started(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


class Store:
    """Records and claims of one folder."""

    def __init__(self, folder: str | Path, *, expiry: float = EXPIRY) -> None:
        self.folder = Path(folder).absolute()
        self.expiry = expiry

    def room(self, name: str) -> Path:
        """Return the folder of the run with that hash, whether it is there or not."""
        return self.folder / name

    def _file(self, name: str) -> Path:
        """Return where the record of a run lies or would: stores made before runs had folders hold ``<hash>.json``."""
        path, old = record_path(self.folder, name), self.folder / f"{name}.json"
        return old if not path.exists() and old.exists() else path

    def version(self, name: str) -> int | None:
        """Return a number that changes whenever the record is written anew; None without a record."""
        try:
            return self._file(name).stat().st_mtime_ns
        except OSError:
            return None

    def load(self, name: str) -> RunRecord | None:
        """Return the record of a run, None without one; a file that cannot be read is reported and put aside."""
        path = self._file(name)
        try:
            record = RunRecord.load(path)
            if record.hash != name:
                raise ValueError(f"{path} holds the record of another run, {record.hash}")
            return record
        except FileNotFoundError:
            return None
        except (ValueError, OSError, RecursionError) as error:
            _put_aside(path, error)
            return None

    def save(self, record: RunRecord) -> Path:
        """Write a record, whole or not at all, and return its path."""
        return record.save(self.folder)

    def names(self) -> list[str]:
        """Return the hashes of all runs with a record, sorted."""
        names = set()
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".json"):
                    names.add(entry.name.removesuffix(".json"))
                elif os.path.exists(os.path.join(entry.path, "record.json")):
                    names.add(entry.name)
        return sorted(names)

    def records(self) -> list[RunRecord]:
        """Return all records that can be read, by hash."""
        return [record for name in self.names() if (record := self.load(name)) is not None]

    def progress(self, name: str) -> dict[str, Any]:
        """Return what the worker of a run wrote last about it; nothing where there is no such file."""
        return _read_json(self.room(name) / "progress.json")

    def claim(self, name: str, token: str) -> Claim | None:
        """Return the claim to a run, or None where someone else's holds.

        A claim is void once it was not touched for ``expiry`` seconds, or at once where its process ran here and ended.

        Args:
            name: the run's hash; its folder has to be there.
            token: unique to this attempt.

        Raises:
            OSError: the folder is not there or cannot be written.
        """
        claim, mine = self.room(name) / "claim", self.room(name) / f".claim-{token}"
        owner = {"token": token, "place": place(), "pid": os.getpid(), "started": _started(os.getpid())}
        _held_here.add(token)
        won = False
        try:
            with open(mine, "x", encoding="utf-8") as file:
                json.dump(owner, file)
            won = _link(mine, claim) or self._take_over(mine, claim)
            return Claim(self, name, token) if won else None
        finally:
            if not won:
                _held_here.discard(token)
            with contextlib.suppress(OSError):
                mine.unlink()

    def _take_over(self, mine: Path, claim: Path) -> bool:
        """Replace a void claim by one's own; of several that try at once, one succeeds."""
        door, now = claim.with_name("takeover"), mine.stat().st_mtime
        if not self._void(claim, now) or not _link(mine, door):
            with contextlib.suppress(OSError):  # whoever held the door for so long died in these few lines
                if now - door.stat().st_mtime > self.expiry:
                    door.unlink()
            return False
        try:
            if not self._void(claim, now):  # seen again, behind the door: nobody else replaces it now
                return False
            if not claim.exists():  # given up meanwhile: anyone may have it
                return _link(mine, claim)
            os.replace(mine, claim)
            return True
        finally:
            door.unlink(missing_ok=True)

    def _void(self, claim: Path, now: float) -> bool:
        try:
            touched = claim.stat().st_mtime
        except FileNotFoundError:
            return True
        owner = _read_json(claim)
        if owner.get("place") == place():
            if owner.get("pid") == os.getpid() and owner.get("token") not in _held_here:
                return True  # left by a Ctrl-C just after it was made
            if not _alive(owner.get("pid", 0), owner.get("started")):
                return True
        return now - touched > self.expiry

    def held(self, name: str) -> bool:
        """Return whether someone's claim to the run holds."""
        claim, probe = self.room(name) / "claim", self.room(name) / f".probe-{os.getpid()}-{time.time_ns()}"
        if not claim.exists():
            return False
        try:
            probe.touch()
            return not self._void(claim, probe.stat().st_mtime)
        except OSError:
            return not self._void(claim, time.time())
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def holds(self, name: str, token: str) -> bool:
        """Return whether the claim to the run is the one with that token."""
        return _read_json(self.room(name) / "claim").get("token") == token

    def stop(self, name: str, token: str) -> None:
        """Ask whoever holds, or will hold, the claim with that token to end the run."""
        with contextlib.suppress(OSError):
            (self.room(name) / f"stop-{token}").touch()

    def void(self, name: str, token: str) -> bool:
        """Remove the claim with that token and what belongs to it; return whether it was there."""
        room, found = self.room(name), self.holds(name, token)
        for file in (f"stop-{token}", *(("progress.json", "claim") if found else ())):
            with contextlib.suppress(OSError):
                (room / file).unlink()
        return found


class Claim:
    """The right to train one run, for as long as it is touched."""

    def __init__(self, store: Store, name: str, token: str) -> None:
        self.store, self.name, self.token = store, name, token
        self.room = store.room(name)

    def mine(self) -> bool:
        """Return whether nobody took the claim over.

        Raises:
            OSError: it cannot be told now.
        """
        try:
            return json.loads((self.room / "claim").read_text(encoding="utf-8")).get("token") == self.token
        except (FileNotFoundError, ValueError):
            return False

    def stopped(self) -> bool:
        """Return whether ``Store.stop`` was called for it."""
        return (self.room / f"stop-{self.token}").exists()

    def touch(self, progress: dict[str, Any]) -> None:
        """Renew the claim and say how far the run is."""
        os.utime(self.room / "claim")
        new = self.room / f".progress-{self.token}"
        new.write_text(json.dumps(progress), encoding="utf-8")
        os.replace(new, self.room / "progress.json")

    def release(self) -> None:
        """Give the claim up, unless it is another's by now."""
        _held_here.discard(self.token)
        self.store.void(self.name, self.token)


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name; return whether that name was free."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:
        if source.stat().st_nlink == 2:  # NFS may lose the answer of a link that was made (open(2), on O_EXCL)
            return True
        try:  # a file system without links
            with open(target, "xb") as file:
                file.write(source.read_bytes())
        except FileExistsError:
            return False
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _put_aside(path: Path, error: Exception) -> None:
    aside = path.with_suffix(f".unreadable-{time.time_ns()}")
    try:
        path.rename(aside)
        report(f"{error}; it was put aside as {aside.name}")
    except OSError as failure:
        report(f"{error}; it could not be put aside ({failure}) and is passed over")


def load_records(store: str | Path) -> list[RunRecord]:
    """Return all records of a store, by hash, or of a ``.jsonl`` file; a relative path lies under ``home()``.

    A record in a store that cannot be read is reported and put aside.

    Raises:
        ValueError: there is no record, or a line of the file holds none.
    """
    path = home() / store
    if path.is_file():
        records = [RunRecord.from_dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        records = Store(path).records()
    if not records:
        raise ValueError(f"no record was found in {path}")
    return records


def save_records(records: Iterable[RunRecord], path: str | Path) -> Path:
    """Write records to one ``.jsonl`` file, a line each: what a repository or a mail can carry. Return its path."""
    path = home() / path
    write_atomic(path, "".join(record.line() for record in records))
    return path
