"""The named ablations: their base run and arms, by preset. Notebooks and the command line call the same functions.

``SANDBOX_PRESET`` scales every study: smoke (a test), quick (``make figures``), laptop (an evening), gpu (GPT-2-small
on tokenized shards under ``data/fineweb10B``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from .compare import best
from .config import DataConfig, ModelConfig, MuonConfig, RunConfig, ScheduleConfig
from .fields import near
from .groups import group_table
from .model import GPT
from .record import RunRecord, table
from .sweep import grid

SCALAR_OPTS = ("adamw", "lion")


@dataclass(frozen=True)
class Preset:
    """How large a study is."""

    name: str
    model: ModelConfig
    data: DataConfig
    steps: int
    batch_size: int  # windows
    seeds: int  # an arm, in a rate sweep
    final_seeds: int  # an arm, in a paired comparison at the best rates
    rates: int  # points a rate sweep, the optimum's guess in their middle
    eval_tokens: int
    widths: tuple[int, ...]  # models of a width study


PRESETS = {
    p.name: p
    for p in (
        Preset(
            name="smoke",
            model=ModelConfig(width=32, depth=1, context=32),
            data=DataConfig(),
            steps=6,
            batch_size=4,
            seeds=2,
            final_seeds=2,
            rates=3,
            eval_tokens=1024,
            widths=(32, 64),
        ),
        Preset(
            name="quick",
            model=ModelConfig(),
            data=DataConfig(),
            steps=100,
            batch_size=16,
            seeds=2,
            final_seeds=4,
            rates=6,
            eval_tokens=40_960,
            widths=(64,),
        ),
        Preset(
            name="laptop",
            model=ModelConfig(),
            data=DataConfig(),
            steps=300,
            batch_size=16,
            seeds=3,
            final_seeds=6,
            rates=7,
            eval_tokens=81_920,
            widths=(64, 128, 256),
        ),
        Preset(
            name="gpu",
            model=ModelConfig(vocab_size=50_304, width=768, depth=12, heads=12, context=1024),
            data=DataConfig(corpus="data/fineweb10B"),
            steps=2000,
            batch_size=64,
            seeds=3,
            final_seeds=6,
            rates=7,
            eval_tokens=10_485_760,
            widths=(768,),
        ),
    )
}


def preset(name: str | None = None) -> Preset:
    """Return the preset of that name; None: the one that ``SANDBOX_PRESET`` names, else quick.

    Raises:
        ValueError: an unknown name.
    """
    name = name or os.environ.get("SANDBOX_PRESET") or "quick"
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} was given: {near(name, PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True)
class Study:
    """A question, its runs, and the field that its figure has on the x axis."""

    name: str  # of its figure
    question: str
    x: str  # dotted field
    runs: tuple[RunConfig, ...]


def base_run(scale: Preset) -> RunConfig:
    """Return the run that every study starts from: Muon on the matrices, rates near their optima elsewhere."""
    return RunConfig(
        model=scale.model,
        data=scale.data,
        optimizer=MuonConfig(lr=0.02, embed_lr=0.01, lm_head_lr=0.003, scalar_lr=0.003),
        schedule=ScheduleConfig(warmup=0.05, decay=0.3),
        steps=scale.steps,
        batch_size=scale.batch_size,
        eval_every=max(1, scale.steps // 4),
        eval_tokens=scale.eval_tokens,
    )


def rates(low: float, high: float, count: int) -> list[float]:
    """Return ``count`` rates from ``low`` to ``high``, evenly spaced in the logarithm, rounded to two digits."""
    return [float(f"{low * (high / low) ** (i / (count - 1)):.2g}") for i in range(count)]


def embed_rate(scale: Preset | None = None) -> Study:
    """Return the sweep of ``embed_lr`` for AdamW and Lion."""
    scale = scale or preset()
    return Study(
        name="embed-rate",
        question="Which rate does the embedding want, for AdamW and for Lion?",
        x="optimizer.embed_lr",
        runs=_sweep_of(scale, {"optimizer.embed_lr": rates(1e-3, 0.3, scale.rates)}),
    )


def head_rate(scale: Preset | None = None) -> Study:
    """Return the sweep of ``lm_head_lr`` for AdamW and Lion."""
    scale = scale or preset()
    return Study(
        name="head-rate",
        question="Which rate does the head want, for AdamW and for Lion?",
        x="optimizer.lm_head_lr",
        runs=_sweep_of(scale, {"optimizer.lm_head_lr": rates(3e-4, 0.1, scale.rates)}),
    )


def _sweep_of(scale: Preset, axes: dict[str, list[float]], seeds: Sequence[int] | None = None) -> tuple[RunConfig, ...]:
    seeds = range(scale.seeds) if seeds is None else seeds
    return tuple(grid(base_run(scale), **{"optimizer.scalar_opt": SCALAR_OPTS, **axes, "seed": list(seeds)}))
