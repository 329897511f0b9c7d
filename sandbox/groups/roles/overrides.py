"""The user's overrides: which override claims which parameter, and what is refused."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ...config import Override
from ...fields import near
from .sites import Place, Places

_PREDICATE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*")  # "package.module:function"


def claims(overrides: Iterable[Override], places: Places) -> dict[int, Override]:
    """Return the override of each claimed parameter, by the parameter's ``id``; a tied one may be matched by any name.

    Raises:
        ValueError: a pattern is no regular expression, its predicate cannot be imported, it matches nothing or frozen
            parameters only, or two overrides claim one parameter.
    """
    claimed: dict[int, Override] = {}
    for override in overrides:
        matches = _matcher(override.pattern)
        found = [p for p in places.first if any(matches(place.name, p.parameter) for place in places.of(p))]
        _refuse_unmatched(override, found, places)
        for place in found:
            other = claimed.setdefault(id(place.parameter), override)
            if other is not override:
                raise ValueError(
                    f"two overrides claim {place.name!r}: {other.pattern!r} and {override.pattern!r}; allowed is one"
                )
    return claimed


def _matcher(pattern: str) -> Callable[[str, nn.Parameter], bool]:
    if _PREDICATE.fullmatch(pattern):
        module, _, function = pattern.partition(":")
        try:
            predicate: Any = importlib.import_module(module)
            return functools.reduce(getattr, function.split("."), predicate)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"the predicate {pattern!r} of an override cannot be imported: {error}") from None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} of an override is no regular expression: {error}") from None
    return lambda name, parameter: compiled.fullmatch(name) is not None


def _refuse_unmatched(override: Override, found: list[Place], places: Places) -> None:
    given = f"the override pattern {override.pattern!r}"
    if not found:
        names = [place.name for first in places.first for place in places.of(first)]
        raise ValueError(f"{given} matches no parameter: {near(override.pattern, names)}")
    if not any(place.parameter.requires_grad for place in found):
        raise ValueError(f"{given} matches frozen parameters only: {', '.join(place.name for place in found[:8])}")
