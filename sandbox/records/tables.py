"""Records -> the tables behind figures and comparisons. pandas only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from ..fields import flatten
from .record import RunRecord


def varying(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return one row a record: ``seed``, and every dotted config field whose values differ between records."""
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
    """Return one row a step of every run: config_hash, status, the curve, validation losses if measured, what varies.

    ``seconds`` counts only training, at the run's mean speed.
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
        frames.append(frame.assign(**{str(name): value for name, value in settings.items()}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def arms(records: Iterable[RunRecord]) -> pd.DataFrame:
    """Return what was compared, one row an arm: seeds, steps, tokens, and each role's elements, rate and decay.

    Rates are those of the groups, before the schedule's factor. ``<role>.lr`` is NaN where an arm has no such role, or
    several rates in it.
    """
    rows: dict[str, dict[str, Any]] = {}
    records = list(records)
    for record, (_, varied) in zip(records, varying(records).iterrows() if records else (), strict=True):
        settings = {str(name): value for name, value in varied.items() if name not in ("seed", "data_seed")}
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
