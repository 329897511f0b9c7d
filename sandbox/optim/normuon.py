"""NorMuon: Muon with a second moment for each output neuron (arXiv 2510.05491, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import DionFamily, Orthogonalize
from .muon import Muon
from .orthogonalize import wide

GUARD = 1e-8  # added to the root of the second moment, as upstream has it


def normuon_update(direction: Tensor, variance: Tensor, *, muon_beta2: float) -> tuple[Tensor, Tensor]:
    """Return NorMuon's direction ``(N, m, n)`` and the next variance ``(N, m, 1)``, from Muon's direction O.

    v <- lerp(v, mean over a row of O^2, 1 - muon_beta2), from 0 and without bias correction.
    O' = O / (sqrt(v) + 1e-8), rescaled to the Frobenius norm of O.
    Each row is multiplied with one number, so both norms follow from the rows' norms: O is read only twice.
    """
    rows = torch.linalg.vector_norm(direction, dim=-1, keepdim=True, dtype=wide(direction.dtype)).square()
    variance = torch.lerp(variance.to(rows.dtype), rows / direction.shape[-1], 1 - muon_beta2)
    factor = (variance.sqrt() + GUARD).reciprocal()
    after = (rows * factor.square()).sum(-2, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    factor = factor * (rows.sum(-2, keepdim=True) / after).sqrt()
    return direction * factor.to(direction.dtype), variance


class NorMuon(DionFamily):
    """NorMuon for matrix groups, AdamW or Lion for groups that name them, in one optimizer.

    Arguments are upstream's (https://github.com/microsoft/dion, ``dion/normuon.py``); every one can also stand in a
    group. ``DionFamily`` says what else a group may hold and what is refused.
    """

    algorithm = "normuon"
    splits = ("num_heads", "split_sizes")
    extras = returned = ("variance_neuron",)
    _accumulate = Muon._accumulate

    def __init__(
        self,
        params: Any,
        distributed_mesh: Any = None,
        lr: float = 0.01,
        mu: float = 0.95,
        muon_beta2: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
        use_gram_newton_schulz: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        newton_schulz_func: Callable[..., Tensor] | None = None,
        *,
        orthogonalize_dtype: str = "auto",
    ) -> None:
        """Check everything, then create the state of every parameter."""
        self._set_up(
            params, distributed_mesh, lr=lr, mu=mu, muon_beta2=muon_beta2, betas=betas, weight_decay=weight_decay,
            cautious_wd=cautious_wd, epsilon=epsilon, nesterov=nesterov, adjust_lr=adjust_lr, flatten=flatten,
            use_gram_newton_schulz=use_gram_newton_schulz, use_triton=use_triton, use_polar_express=use_polar_express,
            newton_schulz_func=newton_schulz_func, orthogonalize_dtype=orthogonalize_dtype,
        )  # fmt: skip

    def _matrix_state(self, p: Tensor, group: dict[str, Any], number: int) -> dict[str, Tensor]:
        """Return one variance for each row that the rule sees, ``(..., fan_out, 1)``, laid out as the weight is."""
        shape = list(p.shape)
        if group.get("transposed"):
            shape[-2] = 1
        elif group["flatten"]:
            shape = [shape[0], 1]
        else:
            shape[-1] = 1
        return {"variance_neuron": torch.zeros(shape, dtype=p.dtype, device=p.device)}

    def _directions(
        self, ahead: list[Tensor], state: list[dict[str, Tensor]], group: dict[str, Any], orthogonalize: Orthogonalize
    ) -> tuple[list[Tensor], Sequence[dict[str, Tensor]]]:
        """Return the directions and the next variances of stacks of matrices."""
        found = [
            normuon_update(direction, old["variance_neuron"], muon_beta2=group["muon_beta2"])
            for direction, old in zip(orthogonalize(ahead), state, strict=True)
        ]
        return [direction for direction, _ in found], [{"variance_neuron": variance} for _, variance in found]
