"""Dion2: orthogonalizes only the rows (or columns) where most momentum has gathered (arXiv 2512.16928)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import DionFamily, Orthogonalize
from .orthogonalize import wide

logger = logging.getLogger(__name__)


def select(momentum: Tensor, fraction: float) -> tuple[int, Tensor]:
    """Return the dim to choose along, and the chosen indices in rising order, ``(N, k, 1)`` or ``(N, 1, k)``.

    Chosen are the k = ceil(fraction * size) rows of largest L1 norm; columns where there are fewer columns than rows.
    """
    m, n = momentum.shape[-2:]
    dim, other = (-2, -1) if m <= n else (-1, -2)
    count = max(1, math.ceil(fraction * momentum.shape[dim]))
    norms = torch.linalg.vector_norm(momentum, 1, dim=other, dtype=wide(momentum.dtype))
    return dim, norms.topk(count, sorted=False).indices.sort().values.unsqueeze(other)


def dion2_update(
    momenta: list[Tensor], *, fraction: float, ef_decay: float, orthogonalize: Orthogonalize
) -> tuple[list[Tensor], list[Tensor]]:
    """Return Dion2's directions, zero outside the chosen rows, and the next momenta, all stacks ``(N, m, n)``.

    The gradient is already in M. With K the chosen rows: O[K] = orth(M[K]), then M[K] <- ef_decay M[K] (the error
    feedback: what was used fades, what was not stays).
    """
    places = [select(momentum, fraction) for momentum in momenta]
    chosen = [torch.take_along_dim(m, index, dim) for m, (dim, index) in zip(momenta, places, strict=True)]
    directions, new = [], []
    for m, part, (dim, index), orthogonal in zip(momenta, chosen, places, orthogonalize(chosen), strict=True):
        index = index.expand_as(part)
        directions.append(torch.zeros_like(m).scatter_(dim, index, orthogonal))
        new.append(m.scatter(dim, index, part * ef_decay))
    return directions, new


class Dion2(DionFamily):
    """Dion2 for matrix groups, AdamW or Lion for groups that name them, in one optimizer.

    Arguments are upstream's (https://github.com/microsoft/dion, ``dion/dion2.py``) and ``cautious_wd``; every one can
    also stand in a group. ``selection_scope`` says whether the rows of a sharded matrix are chosen on each shard
    ("local") or over the whole matrix ("global"); on one process the two are the same. ``verbose`` logs, once for each
    shape, what is chosen. ``DionFamily`` says what else a group may hold.
    """

    algorithm = "dion2"
    splits = ("num_heads",)
    returned = ("momentum",)
    own = (*DionFamily.own, "_verbose", "_shown")

    def __init__(
        self,
        params: Any,
        distributed_mesh: Any = None,
        lr: float = 0.01,
        fraction: float = 0.25,
        ef_decay: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        epsilon: float = 1e-8,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        use_gram_newton_schulz: bool = False,
        newton_schulz_func: Callable[..., Tensor] | None = None,
        verbose: bool = False,
        triton_post_ortho: bool = False,
        selection_scope: str = "local",
        *,
        cautious_wd: bool = False,
        orthogonalize_dtype: str = "auto",
    ) -> None:
        """Check everything, then create the state of every parameter."""
        self._verbose = verbose
        self._shown: set[tuple[int, int]] = set()
        self._set_up(
            params, distributed_mesh, lr=lr, fraction=fraction, ef_decay=ef_decay, betas=betas,
            weight_decay=weight_decay, cautious_wd=cautious_wd, epsilon=epsilon, adjust_lr=adjust_lr, flatten=flatten,
            selection_scope=selection_scope, use_triton=use_triton, use_gram_newton_schulz=use_gram_newton_schulz,
            triton_post_ortho=triton_post_ortho, use_polar_express=use_polar_express,
            newton_schulz_func=newton_schulz_func, orthogonalize_dtype=orthogonalize_dtype,
        )  # fmt: skip

    def _directions(
        self, ahead: list[Tensor], state: list[dict[str, Tensor]], group: dict[str, Any], orthogonalize: Orthogonalize
    ) -> tuple[list[Tensor], Sequence[dict[str, Tensor]]]:
        """Return the directions and the next momenta of stacks of matrices."""
        for m, n in {stack.shape[-2:] for stack in ahead} - self._shown if self._verbose else ():
            self._shown.add((m, n))
            logger.info("Dion2: %g of the %s of %d x %d", group["fraction"], "rows" if m <= n else "columns", m, n)
        directions, momenta = dion2_update(
            ahead, fraction=group["fraction"], ef_decay=group["ef_decay"], orthogonalize=orthogonalize
        )
        return directions, [{"momentum": momentum} for momentum in momenta]
