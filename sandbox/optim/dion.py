"""Dion: a low-rank orthonormal update by one step of power iteration, with error feedback (arXiv 2504.05295)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import DionFamily, Orthogonalize
from .orthogonalize import largest_entry, wide

SUSPICIOUS = 1000  # times epsilon and the largest row of R: where a smaller row makes us look closer
ROUND_OFF = 30  # times epsilon and the largest singular value; measured: at most 4 at 4096 x 1024


def dion_update(
    momentum: Tensor, q: Tensor, *, mu: float, epsilon: float, power_iters: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Dion's direction and the next momentum, ``(N, m, n)``, and the next right factor Q, ``(N, min, r)``.

    The gradient is already in M. With the longer side first: P is an orthonormal basis of M Q; R = M^T P;
    M <- M - (1 - mu) P R^T; Q <- R with unit columns; O = P Q^T (arXiv 2504.05295, Algorithm 1). Where M has fewer than
    r directions, the columns of P that hold only round-off become 0 and those of Q stay. The arithmetic is in float32
    at least, whatever the dtype of the state.
    """
    if momentum.shape[-2] < momentum.shape[-1]:
        o, m, q = dion_update(momentum.mT, q, mu=mu, epsilon=epsilon, power_iters=power_iters)
        return o.mT, m.mT, q
    dtype = wide(momentum.dtype)
    momentum, q = momentum.to(dtype), q.to(dtype)
    size = largest_entry(momentum)  # divided out before anything is squared, so that no finite input overflows
    unit = momentum / size
    for _ in range(power_iters):
        p, r, q = _power_step(unit, q, epsilon / size)
    return p @ q.mT, torch.baddbmm(momentum, p, (r * size).mT, alpha=mu - 1), q


def _power_step(momentum: Tensor, q: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return P, R and the next Q for momenta ``(N, m, n)`` with m >= n; norms below epsilon count as epsilon."""
    p, carries = basis(momentum @ q)
    r = momentum.mT @ p
    norms = torch.linalg.vector_norm(r, dim=-2, keepdim=True)
    return p, r, torch.where(carries, r / torch.maximum(norms, epsilon), q)


def basis(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis P of the columns of y ``(N, m, r)``, and which columns of P are in it ``(N, 1, r)``.

    Where y has fewer than r directions, QR fills P up with columns of round-off, which are not quite orthogonal to the
    others. A very small row of the triangle is the sign of it. The singular values of the triangle do not depend on the
    order of the columns; they say how many directions are round-off, and those are projected out.
    """
    p, triangle = torch.linalg.qr(y)
    epsilon = torch.finfo(y.dtype).eps
    rows = torch.linalg.vector_norm(triangle, dim=-1)
    doubtful = rows.amin(-1) <= SUSPICIOUS * epsilon * rows.amax(-1)
    if not doubtful.any():
        return p, torch.ones_like(rows, dtype=torch.bool).unsqueeze(-2)
    u, s, _ = torch.linalg.svd(triangle[doubtful])
    u = u * (s > ROUND_OFF * epsilon * s[..., :1]).unsqueeze(-2)
    p[doubtful] = p[doubtful] @ (u @ u.mT)
    carries = torch.linalg.vector_norm(p, dim=-2, keepdim=True) > 0.5
    return p * carries, carries


def _one_mesh(replicate: Any, outer: Any, inner: Any, *, sync: bool) -> Any:
    """Return the one mesh over which the work is shared: the outer shard mesh, else the replicate mesh.

    Raises:
        ValueError: an inner shard mesh (tensor parallelism), or a replicate mesh over which the optimizer would have to
            average gradients itself.
    """
    wide = {
        name: mesh
        for name, mesh in {"replicate_mesh": replicate, "inner_shard_mesh": inner, "outer_shard_mesh": outer}.items()
        if mesh is not None and (mesh.size() if callable(getattr(mesh, "size", None)) else 1) > 1
    }
    if "inner_shard_mesh" in wide:
        raise ValueError(f"Dion: inner_shard_mesh of {inner.size()} ranks was given; allowed is one")
    if "replicate_mesh" in wide and (sync or len(wide) > 1):
        raise ValueError(
            f"Dion: replicate_mesh of {replicate.size()} ranks was given; natively gradients are averaged by DDP or "
            "HSDP, and the mesh is needed only without outer_shard_mesh, with replicate_mesh_grad_sync=False"
        )
    return next(iter(wide.values()), None)


class Dion(DionFamily):
    """Dion for matrix groups, AdamW or Lion for groups that name them, in one optimizer.

    Arguments are upstream's (https://github.com/microsoft/dion, ``dion/dion.py``), then ``flatten``, ``cautious_wd``
    and ``seed``, which seeds the private generator that draws the first Q. ``qr_method``, ``rcqr_oversample`` and
    ``cqr_warmup_steps`` are taken so that upstream's calls work, but change nothing: they name faster ways to the same
    basis (up to signs, which cancel), and here the basis always comes from an exact Householder QR. ``DionFamily`` says
    what else a group may hold and what is refused.
    """

    algorithm = "dion"
    extras, returned = ("Q",), ("momentum", "Q")
    own = (*DionFamily.own, "_seed")

    def __init__(
        self,
        params: Any,
        replicate_mesh: Any = None,
        outer_shard_mesh: Any = None,
        inner_shard_mesh: Any = None,
        replicate_mesh_grad_sync: bool = True,
        rank_fraction: float = 1.0,
        rank_multiple_of: int = 1,
        lr: float = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        epsilon: float = 1e-8,
        power_iters: int = 1,
        qr_method: str = "rcqr",
        cqr_warmup_steps: int = 150,
        rcqr_oversample: float = 1.25,
        mixed_precision_config: Any = None,
        *,
        flatten: bool = False,
        cautious_wd: bool = False,
        seed: int = 0,
    ) -> None:
        """Check everything, then create the state of every parameter."""
        if mixed_precision_config is not None:
            raise ValueError("Dion: mixed_precision_config was given; native state has the dtype of its parameter")
        self._seed = seed
        self._set_up(
            params, _one_mesh(replicate_mesh, outer_shard_mesh, inner_shard_mesh, sync=replicate_mesh_grad_sync),
            lr=lr, mu=mu, betas=betas, weight_decay=weight_decay, cautious_wd=cautious_wd, epsilon=epsilon,
            rank_fraction=rank_fraction, rank_multiple_of=rank_multiple_of, power_iters=power_iters,
            qr_method=qr_method, oversample=rcqr_oversample, flatten=flatten,
        )  # fmt: skip

    def synchronize_for_checkpoint(self) -> None:
        """Do nothing, since every rank's state is already what a checkpoint needs; upstream's callers may call it."""

    def _matrix_state(self, p: Tensor, group: dict[str, Any], number: int) -> dict[str, Tensor]:
        """Return Q, ``(..., shorter side, rank)``, Gaussian, drawn from a private generator for each parameter."""
        *batch, m, n = (p.shape[0], p[0].numel()) if group["flatten"] and p.ndim > 2 else p.shape
        multiple = group["rank_multiple_of"]
        rank = min(multiple * math.ceil(group["rank_fraction"] * min(m, n) / multiple), m, n)
        # The CPU generator takes 32 bits of seed; the factor (2^32 over the golden ratio) keeps seeds far apart.
        generator = torch.Generator().manual_seed((self._seed * 0x9E3779B1 + number) % 2**32)
        return {"Q": torch.randn(*batch, min(m, n), rank, generator=generator).to(p.device, p.dtype)}

    def _directions(
        self, ahead: list[Tensor], state: list[dict[str, Tensor]], group: dict[str, Any], orthogonalize: Orthogonalize
    ) -> tuple[list[Tensor], Sequence[dict[str, Tensor]]]:
        """Return the directions and the next state of stacks of matrices."""
        options = {key: group[key] for key in ("mu", "epsilon", "power_iters")}
        found = [dion_update(m, old["Q"], **options) for m, old in zip(ahead, state, strict=True)]
        return [direction for direction, _, _ in found], [{"momentum": m, "Q": q} for _, m, q in found]
