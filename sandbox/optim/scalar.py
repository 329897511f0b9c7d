"""The elementwise rules for vectors and tables, AdamW and Lion, and decoupled weight decay for all rules.

Each updates lists of tensors in place: parameters x, gradients g, momenta m, variances v.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from . import lists

FUSED = ("cpu", "cuda")  # device types for which torch has a fused AdamW kernel in every version that we allow


def decay_(x: list[Tensor], direction: list[Tensor], *, rate: float, cautious: bool) -> None:
    """Decay the parameters: x <- x (1 - rate), with rate = lr * weight_decay, both unscaled.

    Cautious decay (arXiv 2510.12402, Algorithm 1) spares the entries whose sign is opposite to that of the direction
    which is about to be subtracted.
    """
    if not rate:
        return
    if not cautious:
        lists.mul_(x, 1 - rate)
        return
    for parameter, d in zip(x, direction, strict=True):
        parameter.sub_(torch.where(parameter * d >= 0, parameter, 0), alpha=rate)


def adamw_(
    x: list[Tensor],
    g: list[Tensor],
    *,
    m: list[Tensor],
    v: list[Tensor],
    steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    cautious: bool,
) -> None:
    """Take one AdamW step by torch's own fused kernel (arXiv 1711.05101, Algorithm 2).

    m <- lerp(m, g, 1 - beta1); v <- lerp(v, g^2, 1 - beta2);
    x <- x (1 - lr weight_decay) - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon), t from ``steps``, one
    0-d float32 tensor a parameter, so that a parameter which missed a gradient has its own bias correction.
    """
    if cautious:  # the direction has the sign of the momentum to come
        decay_(x, lists.lerp(m, g, 1 - beta1), rate=lr * weight_decay, cautious=True)
        weight_decay = 0.0
    fused = x[0].device.type in FUSED
    torch_adamw(
        x, g, m, v, [], steps, fused=fused, foreach=not fused, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=epsilon,
    )  # fmt: skip


def lion_(
    x: list[Tensor],
    g: list[Tensor],
    *,
    m: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    cautious: bool,
) -> None:
    """Take one Lion step (arXiv 2302.06675, Algorithm 2).

    x <- x (1 - lr weight_decay) - lr sign(lerp(m, g, 1 - beta1)); then m <- lerp(m, g, 1 - beta2).
    """
    direction = lists.lerp(m, g, 1 - beta1)
    lists.sign_(direction)
    lists.lerp_(m, g, 1 - beta2)
    decay_(x, direction, rate=lr * weight_decay, cautious=cautious)
    lists.add_(x, direction, alpha=-lr)
