"""Muon: momentum, orthogonalized (Jordan 2024, https://kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from . import lists
from .base import DionFamily, Orthogonalize


def accumulate(
    gradients: list[Tensor], momenta: list[Tensor], *, mu: float, nesterov: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return U, which Muon and NorMuon orthogonalize, and the next momenta M; lists of tensors of any shapes.

    M <- mu M + G. U is mu M + G with Nesterov's look-ahead, else M. Muon's direction is orth(U).
    """
    momenta = lists.add(gradients, momenta, alpha=mu)
    return lists.add(gradients, momenta, alpha=mu) if nesterov else momenta, momenta


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
            params, distributed_mesh, lr=lr, mu=mu, betas=betas, weight_decay=weight_decay, cautious_wd=cautious_wd,
            epsilon=epsilon, nesterov=nesterov, adjust_lr=adjust_lr, flatten=flatten,
            use_gram_newton_schulz=use_gram_newton_schulz, use_triton=use_triton, use_polar_express=use_polar_express,
            newton_schulz_func=newton_schulz_func, orthogonalize_dtype=orthogonalize_dtype,
        )  # fmt: skip

    def _accumulate(
        self, gradients: list[Tensor], momenta: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what is to be orthogonalized and the next momenta."""
        return accumulate(gradients, momenta, mu=group["mu"], nesterov=group["nesterov"])

    def _directions(
        self, ahead: list[Tensor], state: list[dict[str, Tensor]], group: dict[str, Any], orthogonalize: Orthogonalize
    ) -> tuple[list[Tensor], Sequence[dict[str, Tensor]]]:
        """Return the directions of stacks of matrices; Muon has no state besides the momentum."""
        return orthogonalize(ahead), [{}] * len(ahead)
