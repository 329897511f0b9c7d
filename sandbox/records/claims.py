"""Claims: who trains a run now. Only one holds at a time, among threads, processes and the nodes of a cluster.

A claim is a file made with ``link``, which is exclusive over NFS too (open(2), on O_EXCL). It is void when nobody has
touched it for a while, by the file server's clock; at once where its process ran on this machine and has ended.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

BEAT = 1.0  # seconds between two touches of a claim
EXPIRY = 120.0  # seconds without a touch until a claim is void; NFS may show times 60 s old (nfs(5), acregmax)

_held_here: set[str] = set()  # tokens of this process's claims


class Claim:
    """The right to train one run, for as long as it is touched."""

    def __init__(self, room: Path, token: str) -> None:
        self.room, self.token = room, token

    def mine(self) -> bool:
        """Return whether nobody has taken the claim over.

        Raises:
            OSError: the file cannot be read now.
        """
        try:
            return json.loads((self.room / "claim").read_text(encoding="utf-8")).get("token") == self.token
        except (FileNotFoundError, ValueError):
            return False

    def stopped(self) -> bool:
        """Return whether ``ask_to_stop`` was called for this claim."""
        return (self.room / f"stop-{self.token}").exists()

    def touch(self, progress: dict[str, Any]) -> None:
        """Renew the claim and write down how far the run is."""
        os.utime(self.room / "claim")
        new = self.room / f".progress-{self.token}"
        new.write_text(json.dumps(progress), encoding="utf-8")
        os.replace(new, self.room / "progress.json")

    def release(self) -> None:
        """Give the claim up, unless somebody else has taken it over."""
        _held_here.discard(self.token)
        remove(self.room, self.token)


def take(room: Path, token: str, expiry: float = EXPIRY) -> Claim | None:
    """Return the claim to the run in the folder ``room``, or None where somebody else holds it.

    Args:
        room: must exist.
        token: unique to this attempt.
        expiry: seconds without a touch until a claim is void.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    claim, mine = room / "claim", room / f".claim-{token}"
    owner = {"token": token, "place": place(), "pid": os.getpid(), "started": _started(os.getpid())}
    _held_here.add(token)
    won = False
    try:
        with open(mine, "x", encoding="utf-8") as file:
            json.dump(owner, file)
        won = _link(mine, claim) or _take_over(mine, claim, expiry)
        return Claim(room, token) if won else None
    finally:
        if not won:
            _held_here.discard(token)
        with contextlib.suppress(OSError):
            mine.unlink()


def held(room: Path, expiry: float = EXPIRY) -> bool:
    """Return whether somebody holds a claim to the run."""
    claim, probe = room / "claim", room / f".probe-{os.getpid()}-{time.time_ns()}"
    if not claim.exists():
        return False
    try:
        probe.touch()  # its time is now, by the file server's clock
        return not _void(claim, probe.stat().st_mtime, expiry)
    except OSError:
        return not _void(claim, time.time(), expiry)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def holds(room: Path, token: str) -> bool:
    """Return whether the claim with that token holds the run."""
    return read_json(room / "claim").get("token") == token


def ask_to_stop(room: Path, token: str) -> None:
    """Ask whoever holds, or will hold, the claim with that token to end the run."""
    with contextlib.suppress(OSError):
        (room / f"stop-{token}").touch()


def remove(room: Path, token: str) -> bool:
    """Remove the claim with that token and the files that belong to it; return whether it was there."""
    found = holds(room, token)
    for file in (f"stop-{token}", *(("progress.json", "claim") if found else ())):
        with contextlib.suppress(OSError):
            (room / file).unlink()
    return found


def _take_over(mine: Path, claim: Path, expiry: float) -> bool:
    """Replace a void claim by the new one; of several processes that try at once, one succeeds."""
    door, now = claim.with_name("takeover"), mine.stat().st_mtime
    if not _void(claim, now, expiry) or not _link(mine, door):
        with contextlib.suppress(OSError):  # who held the door for so long has died in these few lines
            if now - door.stat().st_mtime > expiry:
                door.unlink()
        return False
    try:
        if not _void(claim, now, expiry):  # looked at again, since now nobody else can replace it
            return False
        if not claim.exists():  # given up meanwhile: anyone may have it
            return _link(mine, claim)
        os.replace(mine, claim)
        return True
    finally:
        door.unlink(missing_ok=True)


def _void(claim: Path, now: float, expiry: float) -> bool:
    try:
        touched = claim.stat().st_mtime
    except FileNotFoundError:
        return True
    owner = read_json(claim)
    if owner.get("place") == place():
        if owner.get("pid") == os.getpid() and owner.get("token") not in _held_here:
            return True  # a Ctrl-C came just after it was made
        if not _alive(owner.get("pid", 0), owner.get("started")):
            return True
    return now - touched > expiry


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name, and return whether that name was free."""
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


@functools.cache
def place() -> str:
    """Return the host, its boot and its namespace of process ids: where a process id means the same process."""
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
    """Return whether that process still runs, and not another one that was given its number since."""
    if started is not None:
        return _started(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
