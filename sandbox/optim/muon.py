"""Muon: momentum, orthogonalized (Jordan 2024, https://kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .base import DionFamily, Orthogonalize


def muon_update(
    gradient: Tensor, momentum: Tensor, *, mu: float, nesterov: bool, orthogonalize: Orthogonalize
) -> tuple[Tensor, Tensor]:
    """Return Muon's direction O and the next momentum, all ``(N, m, n)``.

    M <- mu M + G; U = mu M + G with Nesterov's look-ahead, else M; O = orth(U).
    """
    ahead, momentum = accumulate(gradient, momentum, mu=mu, nesterov=nesterov)
    return orthogonalize(ahead), momentum


def accumulate(gradient: Tensor, momentum: Tensor, *, mu: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """Return what Muon orthogonalizes and the next momentum; elementwise, any shape."""
    momentum = torch.add(gradient, momentum, alpha=mu)
    return torch.add(gradient, momentum, alpha=mu) if nesterov else momentum, momentum


class Muon(DionFamily):
    """Muon for matrix groups, AdamW or Lion for groups that name them, in one optimizer.

    Arguments are upstream's (https://github.com/microsoft/dion, ``dion/muon.py``); every one can also stand in a
    group. ``DionFamily`` says what else a group may hold and what is refused.
    """

    algorithm = "muon"
    splits = ("num_heads", "split_sizes")

    def __init__(
        self,
        params: Any,
        distributed_mesh: Any = None,
        lr: float = 0.01,
        mu: float = 0.95,
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
            params,
            mesh=distributed_mesh,
            kernels={"use_triton": use_triton, "use_gram_newton_schulz": use_gram_newton_schulz},
            defaults={
                "lr": lr, "mu": mu, "betas": betas, "weight_decay": weight_decay, "cautious_wd": cautious_wd,
                "epsilon": epsilon, "nesterov": nesterov, "adjust_lr": adjust_lr, "flatten": flatten,
            },
            use_polar_express=use_polar_express,
            newton_schulz_func=newton_schulz_func,
            orthogonalize_dtype=orthogonalize_dtype,
        )  # fmt: skip

    def _accumulate(self, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return what is to be orthogonalized and the next momentum."""
        return accumulate(gradient, momentum, mu=group["mu"], nesterov=group["nesterov"])

    def _direction(
        self, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any], orthogonalize: Orthogonalize
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the direction and the next state of a stack of matrices."""
        direction, momentum = muon_update(
            gradient, state["momentum"], mu=group["mu"], nesterov=group["nesterov"], orthogonalize=orthogonalize
        )
        return direction, {"momentum": momentum}
