"""The rate of each role. Only here are ``scalar_lr``, ``embed_lr``, ``lm_head_lr`` and ``scalar_opt`` read.

The rules are those of the reference (NVIDIA NeMo Automodel ``components/optim/dion``). For the head see ``head_rate``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..config import AdamWConfig

REQUIRED = ("lr", "weight_decay", "scalar_opt", "scalar_betas", "scalar_eps")
OPTIONAL = ("scalar_lr", "embed_lr", "lm_head_lr")
ALGORITHMS = ("adamw", "lion")


class Rates(NamedTuple):
    """Rates, decays and the scalar algorithm of one optimizer, by role."""

    base: float  # of the matrices
    decay: float  # of matrices and vectors; tables and heads do not decay
    algorithm: str  # of all roles but matrix: "adamw" or "lion"
    betas: tuple[float, float] | None  # None: the optimizer's own
    eps: float | None  # None: the optimizer's own
    vector: float
    embed: float
    lm_head: float | None  # None: head_rate decides
    declared: dict[str, float]  # the optional rates that were given


def role_rates(
    base_lr: float,
    scalar_opt: str,
    weight_decay: float,
    scalar_betas: Sequence[float] | None = None,
    scalar_eps: float | None = None,
    scalar_lr: float | None = None,
    embed_lr: float | None = None,
    lm_head_lr: float | None = None,
) -> Rates:
    """Return the rate of every role. None falls back to the next more general rate; 0.0 is a rate like any other.

    Raises:
        ValueError: an unknown ``scalar_opt``, or ``scalar_betas`` that are not two numbers.
    """
    if scalar_opt not in ALGORITHMS:
        raise ValueError(f"scalar_opt={scalar_opt!r} was given; allowed is 'adamw' or 'lion'")
    if scalar_betas is not None and not (isinstance(scalar_betas, list | tuple) and len(scalar_betas) == 2):
        raise ValueError(f"scalar_betas={scalar_betas!r} was given; allowed is None or two numbers")
    vector = base_lr if scalar_lr is None else scalar_lr
    given = zip(OPTIONAL, (scalar_lr, embed_lr, lm_head_lr), strict=True)
    return Rates(
        base=base_lr,
        decay=weight_decay,
        algorithm=scalar_opt,
        betas=None if scalar_betas is None else (scalar_betas[0], scalar_betas[1]),
        eps=scalar_eps,
        vector=vector,
        embed=vector if embed_lr is None else embed_lr,
        lm_head=lm_head_lr,
        declared={name: value for name, value in given if value is not None},
    )


def config_rates(config: Any) -> Rates:
    """Return the rates of an ``AdamWConfig``, or of any object that has the reference's attributes.

    Raises:
        ValueError: a required attribute is missing; see also ``role_rates``.
    """
    fixed: dict[str, Any] = {"scalar_opt": "adamw", "scalar_betas": None, "scalar_eps": None}
    fixed = fixed if isinstance(config, AdamWConfig) else {}
    missing = [name for name in REQUIRED if name not in fixed and not hasattr(config, name)]
    if missing:
        raise ValueError(f"{type(config).__name__} lacks {', '.join(missing)}; needed are {', '.join(REQUIRED)}")
    values = {name: getattr(config, name) for name in REQUIRED if name not in fixed} | fixed
    values |= {name: getattr(config, name, None) for name in OPTIONAL}
    return role_rates(values.pop("lr"), **values)


def head_rate(rates: Rates, d_in: int, rule: str) -> float:
    """Return the rate of a head with ``d_in`` inputs.

    Without a declared one: base/sqrt(d_in) for every scalar algorithm under the rule "reference" (NeMo Automodel), for
    Lion alone under "upstream" (arXiv 2504.05295, appendix D.2, figure 14; https://github.com/microsoft/dion/pull/94).
    """
    if rates.lm_head is not None:
        return rates.lm_head
    return rates.base / math.sqrt(d_in) if rule == "reference" or rates.algorithm == "lion" else rates.base
