"""The elementwise rules for vectors and tables, AdamW and Lion, and decoupled weight decay for all rules.

Each updates lists of tensors in place: parameters x, gradients g, momenta m, variances v.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from . import lists

# torch.optim.AdamW(fused=True) calls the same kernel; its name is private, hence the fallback to the public function.
_fused_adamw_ = getattr(torch, "_fused_adamw_", None)
ONE = torch.ones(())  # as in torch.optim: on a CPU a plain number would be wrapped again for every parameter
FUSED = ("cpu", "cuda")  # device types for which every version that we allow has the kernel


def decay_(x: list[Tensor], direction: list[Tensor], *, rate: float, cautious: bool) -> None:
    """Decay the parameters: x <- x (1 - rate), with rate = lr * weight_decay, both unscaled.

    Cautious decay (arXiv 2510.12402, Algorithm 1) leaves out the entries whose sign is opposite to that of the
    direction which will be subtracted next.
    """
    if not rate:
        return
    if not cautious:
        lists.add_(x, x, alpha=-rate)
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
    x <- x (1 - lr weight_decay) - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon). t comes from ``steps``,
    one 0-d float32 tensor for each parameter, since one that had no gradient for a while has taken fewer steps.
    """
    if cautious:  # the direction will have the sign of the next momentum
        decay_(x, lists.lerp(m, g, 1 - beta1), rate=lr * weight_decay, cautious=True)
        weight_decay = 0.0
    if _fused_adamw_ is not None and x[0].device.type in FUSED:
        on_cpu = x[0].device.type == "cpu"
        lists.add_(steps, ONE, alpha=1.0) if on_cpu else lists.add_(steps, 1)
        _fused_adamw_(
            x, g, m, v, [], steps, amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=epsilon,
        )  # fmt: skip
        return
    torch_adamw(
        x, g, m, v, [], steps, foreach=True, amsgrad=False, maximize=False,
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
