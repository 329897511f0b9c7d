"""What all configurations share: fields are checked when an object is made, and it converts to JSON and back.

Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import field, fields, replace
from typing import Any, Literal

# Metadata of a field that was added after runs had been stored. Dicts, and so hashes, leave it out at its default.
LATER = {"later": True}
_KINDS: dict[str, type[Config]] = {}  # class name -> class, of every config that JSON may name as its "kind"


def near(name: str, known: Iterable[str]) -> str:
    """Return how an error sentence ends: with names close to ``name`` if there are any, else with all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known are {', '.join(map(repr, known))}"


def _coerce(name: str, hint: Any, value: Any) -> Any:
    """Return ``value`` in the type that the annotation names (int -> float, list -> tuple), or raise a ValueError."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        try:
            return _fit(option, value)
        except (TypeError, ValueError):
            continue
    raise ValueError(f"{name}={value!r} was given; allowed is {' or '.join(map(_spell, options))}")


def _fit(hint: Any, value: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in args:
            return value
    elif origin is tuple and isinstance(value, tuple | list):
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        return tuple(_fit(h, v) for h, v in zip(hints, value, strict=True))
    elif isinstance(value, bool) or hint is bool:
        if hint is bool and isinstance(value, bool):
            return value
    elif hint is float:
        if not isinstance(value, str) and math.isfinite(value):
            return float(value)
    elif hint is int:
        return operator.index(value)
    elif hint is Any or isinstance(value, origin or hint):
        return value
    raise ValueError


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    names = {type(None): "None", float: "a finite number", int: "an integer", str: "a string", bool: "True or False"}
    return names.get(hint, getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint))


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


class Config:
    """The base of all configs: checks and converts its values when it is made, and converts to a dict and back."""

    __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[Any]]]  # every subclass is a dataclass

    def __init_subclass__(cls) -> None:
        """Register the class under its name, for ``from_dict``."""
        _KINDS[cls.__name__] = cls

    def __post_init__(self) -> None:
        """Check each field against its annotation and its bounds."""
        hints = _hints(type(self))  # type: ignore[arg-type]  # mypy takes a class's __hash__ for that of its instances
        for f in fields(self):
            name = f"{type(self).__name__}.{f.name}"
            value = _coerce(name, hints[f.name], getattr(self, f.name))
            low, high = f.metadata.get("low", -math.inf), f.metadata.get("high", math.inf)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(low <= v <= high for v in numbers if isinstance(v, int | float)):
                allowed = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
                raise ValueError(f"{name}={value!r} was given; allowed is {allowed}")
            object.__setattr__(self, f.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; ``kind`` is the name of the class, for this config and for each one inside it.

        Fields marked ``LATER`` are left out when they have their default.
        """
        shown = [f for f in fields(self) if not f.metadata.get("later") or getattr(self, f.name) != f.default]
        return {"kind": type(self).__name__} | {f.name: _plain(getattr(self, f.name)) for f in shown}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> typing.Self:
        """Return the config that ``to_dict`` wrote; fields that are absent take their defaults.

        Raises:
            ValueError: an unknown field or kind, with near names.
        """
        values = dict(values)
        kind = values.pop("kind", cls.__name__)
        own = _KINDS.get(kind)
        if own is None or not issubclass(own, cls):
            raise ValueError(f"config kind {kind!r} was given for {cls.__name__}: {near(kind, _KINDS)}")
        known = {f.name for f in fields(own)}
        for name in values.keys() - known:
            raise ValueError(f"{kind} has no field {name!r}: {near(name, known)}")
        return own(**{name: _revive(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return value


def _revive(value: Any) -> Any:
    if isinstance(value, Mapping) and value.get("kind") in _KINDS:
        return _KINDS[value["kind"]].from_dict(value)
    return [_revive(v) for v in value] if isinstance(value, list) else value


def at_least(low: float, default: Any, high: float = math.inf) -> Any:
    """Return a dataclass field whose number (each number of a tuple) lies from ``low`` to ``high``."""
    return field(default=default, metadata={"low": low, "high": high})


def with_field(config: Any, path: str, value: Any) -> Any:
    """Return ``config`` with the field at the dotted ``path`` replaced, as in ``"optimizer.embed_lr"``.

    Raises:
        ValueError: there is no such field, with near names.
    """
    head, _, rest = path.partition(".")
    if isinstance(config, Mapping):  # the kwargs of a factory: any key is allowed
        return {**config, head: with_field(config[head], rest, value) if rest else value}
    known = {f.name for f in fields(config)} if dataclasses.is_dataclass(config) else set()
    if head not in known:
        where = f"{type(config).__name__} has no field {head!r}"
        raise ValueError(f"{where}: {near(head, known)}" if known else where)
    return replace(config, **{head: with_field(getattr(config, head), rest, value) if rest else value})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one with dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
