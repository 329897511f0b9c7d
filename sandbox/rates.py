"""The rate of each role: the one place where ``scalar_lr``, ``embed_lr``, ``lm_head_lr`` and ``scalar_opt`` are read.

The rules are the reference's (NVIDIA NeMo Automodel ``components/optim/dion``); for the head see ``lm_head_rate``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

ALGORITHMS = ("adamw", "lion")


class Rates(NamedTuple):
    """Rates, decays and the scalar algorithm of one optimizer, by role; None among the rates means not declared."""

    base: float  # of the matrices
    decay: float  # of matrices and vectors; tables and heads have none
    algorithm: str  # of all but the matrices: "adamw" or "lion"
    betas: tuple[float, float] | None  # None: the optimizer's own
    eps: float | None
    vector: float
    embed: float
    lm_head: float | None  # None: by rule
    declared: tuple[str, ...]  # the optional rates that were given


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
    """Return every role's own rate: what is not given falls back, and 0.0 counts as given.

    Raises:
        ValueError: an unknown ``scalar_opt``, or ``scalar_betas`` that are not two numbers.
    """
    if scalar_opt not in ALGORITHMS:
        raise ValueError(f"scalar_opt={scalar_opt!r} was given; allowed is 'adamw' or 'lion'")
    if scalar_betas is not None and (isinstance(scalar_betas, str) or len(tuple(scalar_betas)) != 2):
        raise ValueError(f"scalar_betas={scalar_betas!r} was given; allowed is None or two numbers")
    optional = {"scalar_lr": scalar_lr, "embed_lr": embed_lr, "lm_head_lr": lm_head_lr}
    vector = base_lr if scalar_lr is None else scalar_lr
    return Rates(
        base=base_lr,
        decay=weight_decay,
        algorithm=scalar_opt,
        betas=None if scalar_betas is None else (scalar_betas[0], scalar_betas[1]),
        eps=scalar_eps,
        vector=vector,
        embed=vector if embed_lr is None else embed_lr,
        lm_head=lm_head_lr,
        declared=tuple(name for name, value in optional.items() if value is not None),
    )


def config_rates(config: Any) -> Rates:
    """Return the rates of any config with the reference's attributes, or of an ``AdamWConfig``.

    Raises:
        ValueError: a required attribute is missing; see also ``role_rates``.
    """
    baseline = {"scalar_opt": "adamw", "scalar_betas": None, "scalar_eps": None} if hasattr(config, "eps") else {}
    required = ("lr", "weight_decay", "scalar_opt", "scalar_betas", "scalar_eps")
    missing = [name for name in required if not hasattr(config, name) and name not in baseline]
    if missing:
        raise ValueError(f"{type(config).__name__} lacks {', '.join(missing)}; needed are {', '.join(required)}")
    base, *fixed = (getattr(config, name, baseline.get(name)) for name in required)
    optional = {name: getattr(config, name, None) for name in ("scalar_lr", "embed_lr", "lm_head_lr")}
    decay, algorithm, betas, eps = fixed
    return role_rates(base, algorithm, decay, betas, eps, **optional)


def lm_head_rate(rates: Rates, d_in: int, rule: str) -> float:
    """Return the rate of a head with ``d_in`` inputs.

    Without a declared one: base/sqrt(d_in) for every scalar algorithm under the rule "reference" (NeMo Automodel), for
    Lion alone under "upstream" (arXiv 2504.05295, appendix D.2, figure 14; https://github.com/microsoft/dion/pull/94).
    """
    if rates.lm_head is not None:
        return rates.lm_head
    return rates.base / math.sqrt(d_in) if rule == "reference" or rates.algorithm == "lion" else rates.base
