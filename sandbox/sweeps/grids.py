"""Many runs from one base: ``grid`` in a notebook, a JSON file on a server.

A file holds ``{"base": {"steps": 300}, "axes": {"optimizer.lr": [0.01, 0.1]}}``. ``base`` is a run as
``RunConfig.to_dict`` writes it. Fields that it leaves out take their defaults, and ``kind`` is needed only where a part
is of another class than the default's. ``axes`` are those of ``grid``, the last one fastest.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..fields import Config, near, with_field


def grid(base: RunConfig, **axes: Iterable[Any]) -> list[RunConfig]:
    """Return one run for each combination of the axes' values, the last axis fastest.

    Axes are dotted fields: ``grid(base, **{"optimizer.lm_head_lr": [1e-3, 1e-2], "seed": [0, 1]})``.

    Raises:
        ValueError: a field that does not exist, with near names, or a value that it does not allow.
    """
    for name, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"axis {name}={values!r} was given; allowed is a list of values")
    axes = {name: list(values) for name, values in axes.items()}
    runs = []
    for values in itertools.product(*axes.values()):
        run = base
        for name, value in zip(axes, values, strict=True):
            run = with_field(run, name, value)
        runs.append(run)
    return runs


def read_spec(path: str | Path) -> list[RunConfig]:
    """Return the runs of a file.

    Raises:
        ValueError: there is no such file, it is no JSON, or it names what does not exist; the sentence names the file.
    """
    try:
        return runs_of(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def runs_of(spec: Any) -> list[RunConfig]:
    """Return the runs of a specification.

    Raises:
        ValueError: another key than base and axes, a field that does not exist, or a value that it does not allow.
    """
    if not isinstance(spec, Mapping):
        raise ValueError(f"{type(spec).__name__} was given; allowed is an object with base and axes")
    for key in spec:
        if key not in ("base", "axes"):
            raise ValueError(f"key {key!r} was given: {near(key, ('base', 'axes'))}")
    base, axes = spec.get("base", {}), spec.get("axes", {})
    for name, value in (("base", base), ("axes", axes)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}={value!r} was given; allowed is an object")
    for name, values in axes.items():
        if not isinstance(values, list):
            raise ValueError(f"axis {name}={values!r} was given; allowed is a list of values")
    run = RunConfig.from_dict(_merged(RunConfig().to_dict(), base))
    return grid(run, **{name: [_value(value) for value in values] for name, values in axes.items()})


def _merged(default: Any, given: Any) -> Any:
    """Return ``given`` with what it leaves out; an object of another kind, or without a default, stands for itself."""
    if not isinstance(default, Mapping) or not isinstance(given, Mapping):
        return given
    if given.get("kind", default.get("kind")) != default.get("kind"):
        return given
    return {**default, **{key: _merged(default.get(key), value) for key, value in given.items()}}


def _value(value: Any) -> Any:
    return Config.from_dict(value) if isinstance(value, Mapping) and "kind" in value else value
