"""The store: one folder for each run, named by the run's hash.

``<store>/<hash>/record.json`` is what the run left; it appears whole or not at all. ``claim`` says who trains the run
now, ``progress.json`` how far it is. Notebooks, processes and the nodes of a cluster may share a store, also over NFS.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from . import claims
from .files import home, record_path, write_atomic
from .record import RunRecord


def report(sentence: str) -> None:
    """Write one line to stderr, above a progress bar where there is one."""
    tqdm.write(sentence, file=sys.stderr)


class Store:
    """Records and claims of one folder."""

    def __init__(self, folder: str | Path, *, expiry: float = claims.EXPIRY) -> None:
        self.folder = Path(folder).absolute()
        self.expiry = expiry

    def room(self, name: str) -> Path:
        """Return the folder of the run with that hash; it may not exist."""
        return self.folder / name

    def _file(self, name: str) -> Path:
        """Return the path of a run's record, existing or not. Old stores, without folders, hold ``<hash>.json``."""
        path, old = record_path(self.folder, name), self.folder / f"{name}.json"
        return old if not path.exists() and old.exists() else path

    def version(self, name: str) -> int | None:
        """Return a number that changes whenever the record is written again; None without a record."""
        try:
            return self._file(name).stat().st_mtime_ns
        except OSError:
            return None

    def load(self, name: str) -> RunRecord | None:
        """Return the record of a run, or None. A file that cannot be read is reported and put aside."""
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
        """Return what the run's worker last wrote about its progress; an empty dict where there is nothing."""
        return claims.read_json(self.room(name) / "progress.json")

    def claim(self, name: str, token: str) -> claims.Claim | None:
        """Return the claim to a run, or None where somebody else holds it; ``token`` is unique to this attempt.

        Raises:
            OSError: the run's folder does not exist or cannot be written.
        """
        return claims.take(self.room(name), token, self.expiry)

    def held(self, name: str) -> bool:
        """Return whether somebody holds a claim to the run."""
        return claims.held(self.room(name), self.expiry)

    def holds(self, name: str, token: str) -> bool:
        """Return whether the claim with that token holds the run."""
        return claims.holds(self.room(name), token)

    def stop(self, name: str, token: str) -> None:
        """Ask whoever holds, or will hold, the claim with that token to end the run."""
        claims.ask_to_stop(self.room(name), token)

    def void(self, name: str, token: str) -> bool:
        """Remove the claim with that token and the files that belong to it; return whether it was there."""
        return claims.remove(self.room(name), token)


def _put_aside(path: Path, error: Exception) -> None:
    aside = path.with_suffix(f".unreadable-{time.time_ns()}")
    try:
        path.rename(aside)
        report(f"{error}; it was put aside as {aside.name}")
    except OSError as failure:
        report(f"{error}; it could not be put aside ({failure}) and is ignored")


def load_records(store: str | Path) -> list[RunRecord]:
    """Return all records of a store, by hash, or of a ``.jsonl`` file; a relative path is under ``home()``.

    A record in a store that cannot be read is reported and put aside.

    Raises:
        ValueError: there is no record, or a line of the file is no record.
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
    """Write records to one ``.jsonl`` file, a line each, small enough for a repository or a mail. Return its path."""
    path = home() / path
    write_atomic(path, "".join(record.line() for record in records))
    return path
