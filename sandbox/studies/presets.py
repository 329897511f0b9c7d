"""The named ablations: their base run and arms, by preset. Notebooks and the command line call the same functions.

``SANDBOX_PRESET`` scales every study: smoke (a test), quick (``make figures``), laptop (an evening), gpu (GPT-2-small
on tokenized shards under ``data/fineweb10B``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import pandas as pd

from ..config import (
    AdamWConfig,
    DataConfig,
    Dion2Config,
    DionConfig,
    GroupPolicy,
    ModelConfig,
    MuonConfig,
    NorMuonConfig,
    Override,
    RunConfig,
    ScalarOpt,
    ScheduleConfig,
)
from ..fields import near
from ..records.comparison import best
from ..records.files import ROOT
from ..records.record import RunRecord
from ..records.tables import table
from ..sweeps.grids import grid

SCALAR_OPTS: tuple[ScalarOpt, ...] = ("adamw", "lion")


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
    widths: tuple[int, ...]  # of the models; several make a rate sweep of each


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
            widths=(32,),
        ),
        Preset(
            name="quick",
            model=ModelConfig(),
            data=DataConfig(),
            steps=100,
            batch_size=8,
            seeds=3,
            final_seeds=6,
            rates=6,
            eval_tokens=20_480,
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
            data=DataConfig(corpus=str(ROOT / "data" / "fineweb10B")),
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


def base_optimizer() -> MuonConfig:
    """Return the optimizer that every study starts from: Muon for the matrices, other rates near their optima."""
    return MuonConfig(lr=0.02, embed_lr=0.3, lm_head_lr=0.01, scalar_lr=0.003)


def base_run(scale: Preset) -> RunConfig:
    """Return the run that every study starts from."""
    return RunConfig(
        model=scale.model,
        data=scale.data,
        optimizer=base_optimizer(),
        schedule=ScheduleConfig(warmup=0.05, decay=0.3),
        steps=scale.steps,
        batch_size=scale.batch_size,
        eval_every=max(1, scale.steps // 2),
        eval_tokens=scale.eval_tokens,
    )


def log_spaced(low: float, high: float, count: int) -> list[float]:
    """Return ``count`` numbers from ``low`` to ``high``, evenly spaced in the logarithm, rounded to two digits."""
    return [float(f"{low * (high / low) ** (i / (count - 1)):.2g}") for i in range(count)]


def embed_rate(scale: Preset | None = None) -> Study:
    """Return the sweep of ``embed_lr`` for AdamW and Lion."""
    scale = scale or preset()
    return Study(
        name="embed-rate",
        question="Which rate does the embedding want, for AdamW and for Lion?",
        x="optimizer.embed_lr",
        runs=_sweep_of(scale, {"optimizer.embed_lr": log_spaced(0.01, 10, scale.rates)}),
    )


def head_rate(scale: Preset | None = None) -> Study:
    """Return the sweep of ``lm_head_lr`` for AdamW and Lion."""
    scale = scale or preset()
    return Study(
        name="head-rate",
        question="Which rate does the head want, for AdamW and for Lion?",
        x="optimizer.lm_head_lr",
        runs=_sweep_of(scale, {"optimizer.lm_head_lr": log_spaced(1e-3, 0.1, scale.rates)}),
    )


def _sweep_of(scale: Preset, axes: dict[str, list[float]]) -> tuple[RunConfig, ...]:
    """Return the runs over ``axes`` for AdamW and for Lion, and for several widths if the preset has them."""
    return _runs(scale, {"optimizer.scalar_opt": SCALAR_OPTS, **axes})


def _runs(scale: Preset, axes: dict[str, Iterable[Any]]) -> tuple[RunConfig, ...]:
    widths = {"model.width": scale.widths} if len(scale.widths) > 1 else {}
    return tuple(grid(base_run(scale), **{**widths, **axes, "seed": range(scale.seeds)}))


def compared(data: pd.DataFrame) -> list[str]:
    """Return the columns of a study's table that are compared at their best rates: the optimizer, and widths if any."""
    return [name for name in ("model.width", "optimizer.scalar_opt") if name in data]


def scalar_rate(scale: Preset | None = None) -> Study:
    """Return the sweep of one rate shared by embedding, head and vectors, for AdamW and Lion."""
    scale = scale or preset()
    arms = [
        replace(base_optimizer(), scalar_opt=scalar_opt, scalar_lr=rate, embed_lr=rate, lm_head_lr=rate)
        for scalar_opt in SCALAR_OPTS
        for rate in log_spaced(3e-3, 0.3, scale.rates)
    ]
    return Study(
        name="scalar-rate",
        question="Which rate do all groups but the matrices want together, for AdamW and for Lion?",
        x="optimizer.scalar_lr",
        runs=_runs(scale, {"optimizer": arms}),
    )


def scalar_opt(records: Sequence[RunRecord], scale: Preset | None = None) -> Study:
    """Return AdamW against Lion, each at its best rate in ``records`` of ``scalar_rate``, on fresh seeds.

    The seeds that chose a rate would make it look better than it is.
    """
    scale = scale or preset()
    runs: list[RunConfig] = []
    data = table(records)
    varied = [*compared(data), "optimizer.scalar_lr"]
    for arm in best(data, by=compared(data)).to_dict("records"):
        chosen = next(r.config for r in records if all(attrgetter(name)(r.config) == arm[name] for name in varied))
        runs += grid(chosen, seed=range(100, 100 + scale.final_seeds))
    return Study(
        name="scalar-opt",
        question="Each at its own best rate, which scalar optimizer trains better, AdamW or Lion?",
        x="optimizer.scalar_opt",
        runs=tuple(runs),
    )


def grouping(scale: Preset | None = None) -> Study:
    """Return groups by role against the wrong way, which takes every 2-D weight as a matrix, at several base rates."""
    scale = scale or preset()
    right = base_run(scale)
    tables = tuple(Override(pattern=pattern, role="matrix") for pattern in (r"embed\.weight", r"lm_head\.weight"))
    wrong = replace(right, optimizer=MuonConfig(scalar_lr=0.003, policy=GroupPolicy(overrides=tables)))
    rates = log_spaced(0.005, 1.25, max(3, scale.rates - 1))
    axes: dict[str, Iterable[Any]] = {"optimizer.lr": rates, "seed": range(scale.seeds)}
    return Study(
        name="grouping",
        question="What does it cost to hand the embedding and the head to the orthogonal optimizer?",
        x="optimizer.lr",
        runs=tuple(grid(right, **axes) + grid(wrong, **axes)),
    )


def optimizers(scale: Preset | None = None) -> Study:
    """Return the four Dion-family optimizers and AdamW, each over its own base rates; all else is the same."""
    scale = scale or preset()
    # Three times as long as a rate sweep, in which the tables learn and the matrices hardly matter.
    start, count = replace(base_run(scale), steps=3 * scale.steps), max(3, scale.rates - 1)
    shared = {"embed_lr": 0.3, "lm_head_lr": 0.01, "scalar_lr": 0.003}
    grids = {
        **dict.fromkeys((MuonConfig, NorMuonConfig, Dion2Config, DionConfig), log_spaced(0.005, 0.08, count)),
        AdamWConfig: log_spaced(0.002, 0.032, count),
    }
    runs: list[RunConfig] = []
    for kind, rates in grids.items():
        run = replace(start, optimizer=kind(**shared))
        runs += grid(run, **{"optimizer.lr": rates, "seed": range(scale.seeds)})
    return Study(
        name="optimizers",
        question="Each at its own best base rate, which matrix optimizer trains best, per step and per second?",
        x="optimizer.lr",
        runs=tuple(runs),
    )
