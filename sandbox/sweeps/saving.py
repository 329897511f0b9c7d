"""Records that have to reach the disk: what a full disk does not take is kept in memory and tried again."""

from __future__ import annotations

from ..records import RunRecord, Store
from ..records.store import report


class Saver:
    """Writes records to a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.unsaved: dict[str, RunRecord] = {}  # by hash
        self._told: set[str] = set()  # hashes of those that a message was printed for

    def save(self, record: RunRecord) -> None:
        """Write a record, and with it those that could not be written before."""
        self.unsaved[record.hash] = record
        for name, waiting in list(self.unsaved.items()):
            try:
                self.store.save(waiting)
                del self.unsaved[name]
            except OSError as error:
                if name not in self._told:
                    report(f"the record of {name} could not be written ({error}); it is kept in memory and tried again")
                self._told.add(name)

    def close(self) -> None:
        """Try once more, and say how many records exist only in memory."""
        for record in list(self.unsaved.values())[:1]:
            self.save(record)
        if self.unsaved:
            report(f"{len(self.unsaved)} records are in memory only, in what this sweep returns")
