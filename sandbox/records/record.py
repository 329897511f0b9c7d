"""What a run leaves: a ``RunRecord`` and its JSON file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ..config import RunConfig
from ..fields import near
from .files import record_path, write_atomic

SCHEMA = 1  # version of the JSON file; a newer one is refused

Status = Literal["finished", "diverged", "failed", "interrupted"]
STATUSES = get_args(Status)


@dataclass(kw_only=True)
class RunRecord:
    """One run, as it went. ``curve``, ``evaluations`` and ``rms`` are columns: ``pandas.DataFrame(record.curve)``."""

    config: RunConfig  # resolved: no "auto" left
    hash: str  # of the config
    status: Status
    curve: dict[str, list[float]] = field(
        default_factory=dict
    )  # step (1-based), tokens, train_loss (nats/token), factor
    evaluations: dict[str, list[float]] = field(
        default_factory=dict
    )  # step, val_loss (nats/token), val_bpb (bits/byte)
    rms: dict[str, list[Any]] = field(default_factory=dict)  # step, role, weight, gradient, update
    groups: list[dict[str, Any]] = field(default_factory=list)  # rows of groups.group_table
    timing: dict[str, float] = field(default_factory=dict)  # ms a step by part, tokens/s, seconds, peak bytes
    environment: dict[str, Any] = field(default_factory=dict)  # hashes, versions, device, backend, threads, commit
    error: str | None = None  # the traceback of a failed run, the reason of a diverged one

    @property
    def val_loss(self) -> float:
        """The last validation loss in nats/token; NaN unless the run finished."""
        return self.evaluations["val_loss"][-1] if self.status == "finished" else math.nan

    @property
    def val_bpb(self) -> float:
        """The last validation loss in bits/byte; NaN unless the run finished on text."""
        return self.evaluations["val_bpb"][-1] if self.status == "finished" else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return strict JSON values; a number that is not finite becomes None."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"schema": SCHEMA} | _finite(values | {"config": self.config.to_dict()})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunRecord:
        """Return the record that ``to_dict`` wrote.

        Raises:
            ValueError: the schema is newer, or this is no record.
        """
        values = dict(values)
        schema = values.pop("schema", None)
        if not isinstance(schema, int) or schema > SCHEMA:
            raise ValueError(f"record schema {schema!r} was given; allowed is up to {SCHEMA}")
        for columns in ("curve", "evaluations", "rms"):
            values[columns] = {
                name: [math.nan if v is None else v for v in column] for name, column in values[columns].items()
            }
        record = cls(**values | {"config": RunConfig.from_dict(values["config"])})
        if record.status not in STATUSES:
            raise ValueError(f"status {record.status!r} was given: {near(str(record.status), STATUSES)}")
        if record.status == "finished" and not record.evaluations.get("val_loss"):
            raise ValueError("a finished run was given without a validation loss")
        return record

    def save(self, folder: Path) -> Path:
        """Write ``folder/<hash>/record.json``, whole or not at all, and return its path."""
        path = record_path(folder, self.hash)
        write_atomic(path, self.line())
        return path

    def line(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":")) + "\n"

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Return the record in a file.

        Raises:
            ValueError: the file is cut off, holds something else, or has a newer schema; the message names it.
        """
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} holds no readable record: {error}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
