"""What a run leaves: a ``RunRecord``, its JSON file, and the tables that figures are drawn from. No torch here.

Relative stores and report folders live under ``home()``, so that a kernel started anywhere writes to one place.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from .config import RunConfig
from .fields import flatten, near

SCHEMA = 1  # of the JSON file; a newer one is refused, not guessed at

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
            ValueError: a newer schema, or no record at all.
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
            ValueError: the file is cut off, foreign, or of a newer schema; the sentence names it.
        """
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} holds no readable record: {error}") from error


def record_path(folder: Path, name: str) -> Path:
    """Return where the record of the run with that hash lies in a store."""
    return folder / name / "record.json"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all; its folder is made where missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def home() -> Path:
    """Return the folder that holds ``runs/`` and ``reports/``.

    ``SANDBOX_HOME`` where set; a temporary folder, removed when the process ends, at smoke scale; else the checkout
    that this package stands in; else the working directory.
    """
    if os.environ.get("SANDBOX_HOME"):
        return Path(os.environ["SANDBOX_HOME"]).expanduser().resolve()
    if os.environ.get("SANDBOX_PRESET") == "smoke":
        return _scratch()
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() else Path.cwd()


@functools.cache
def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="dion-sandbox-smoke-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def reports_home() -> Path:
    """Return the folder that figures go to."""
    return home() / "reports"


def varying(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return one row a record: ``seed``, and every dotted config field in which those that have it differ."""
    flat = [{k: _cell(v) for k, v in flatten(record.config.to_dict()).items()} for record in records]
    seen: dict[str, set[Any]] = {}
    for row in flat:
        for name, value in row.items():
            seen.setdefault(name, set()).add(value)
    names = [name for name, values in seen.items() if name == "seed" or len(values) > 1]
    return pd.DataFrame([{name: row.get(name) for name in names} for row in flat])


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value


def table(records: Iterable[RunRecord]) -> pd.DataFrame:
    """Return one row a run: config_hash, status, val_loss (nats/token), val_bpb (bits/byte), then what varies."""
    records = list(records)
    result = pd.DataFrame(
        {
            "config_hash": [r.hash for r in records],
            "status": [r.status for r in records],
            "val_loss": [r.val_loss for r in records],
            "val_bpb": [r.val_bpb for r in records],
        }
    )
    return result.join(varying(records)) if records else result


def curves(records: Iterable[RunRecord]) -> pd.DataFrame:
    """Return one row a step of every run: config_hash, status, the curve, losses where evaluated, what varies.

    ``seconds`` counts training alone, at the run's mean speed.
    """
    records = list(records)
    frames = []
    for record, (_, settings) in zip(records, varying(records).iterrows() if records else (), strict=True):
        frame = pd.DataFrame(record.curve or {"step": [], "tokens": [], "train_loss": [], "factor": []})
        evaluated = pd.DataFrame(record.evaluations or {"step": [], "val_loss": [], "val_bpb": []})
        frame = frame.merge(evaluated, on="step", how="left")
        frame["seconds"] = frame["tokens"] / record.timing.get("tokens_per_second", math.nan)
        frame.insert(0, "config_hash", record.hash)
        frame.insert(1, "status", record.status)
        frames.append(frame.assign(**settings.to_dict()))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def arms(records: Iterable[RunRecord]) -> pd.DataFrame:
    """Return one row an arm: what was compared. Seeds, steps, tokens, and each role's elements, rate and decay.

    Rates are those of the groups before the schedule's factor; ``<role>.lr`` is NaN where an arm lacks the role or
    has several rates in it.
    """
    rows: dict[str, dict[str, Any]] = {}
    records = list(records)
    for record, (_, settings) in zip(records, varying(records).iterrows() if records else (), strict=True):
        settings = settings.drop(["seed", "data_seed"], errors="ignore").to_dict()
        row = rows.setdefault(json.dumps(settings, default=str), settings | {"seeds": 0, "steps": record.config.steps})
        row["seeds"] += 1
        row["tokens"] = max(row.get("tokens", 0), *record.curve.get("tokens", [0]), 0)
        for role in dict.fromkeys(group["role"] for group in record.groups):
            own = [group for group in record.groups if group["role"] == role]
            row[f"{role}.elements"] = sum(group["elements"] for group in own)
            for key in ("lr", "weight_decay"):
                values = {group[key] for group in own}
                row[f"{role}.{key}"] = values.pop() if len(values) == 1 else math.nan
    return pd.DataFrame(list(rows.values()))
