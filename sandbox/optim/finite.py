"""The check for gradients that are not finite: the step is refused before anything is changed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import lists
from .options import SCALAR

MARGIN = 0.01  # of a dtype's largest number; beyond it momentum could overflow to inf, and inf - inf is nan
SMALL = 2**12  # elements up to which a call costs more than its arithmetic


class NonFiniteGradient(ValueError):
    """A gradient holds nan, inf, or a number beyond a hundredth of its dtype's largest; nothing was changed."""


def name_of(group: Mapping[str, Any], i: int) -> str:
    """Return what an error calls parameter ``i`` of a group: its name where the group has names, else its number."""
    if "param_names" in group:
        return repr(group["param_names"][i])
    kind = group.get("role") or group.get("algorithm")
    return f"parameter {i} of the {kind} group"


def check(groups: Sequence[Mapping[str, Any]]) -> None:
    """Return if every gradient is dense and finite. Costs one transfer for each dtype and device.

    Raises:
        NonFiniteGradient: naming the parameters.
        ValueError: a sparse gradient.
    """
    probes: dict[Any, list[Tensor]] = {}
    for group in reversed(groups):  # so that what the step needs first is still in the cache
        elementwise = group["algorithm"] in SCALAR
        for kind, grads in _dense(group).items():
            probes.setdefault(kind, []).extend(_probe(grads, elementwise))
    if all(abs(v) <= _surely(dtype) for (dtype, _), probe in probes.items() for v in torch.stack(probe).tolist()):
        return
    bad = [name_of(g, i) for g in groups for i, p in enumerate(g["params"]) if p.grad is not None and not _fits(p.grad)]
    if bad:
        raise NonFiniteGradient(
            f"the gradient of {', '.join(bad)} is not finite, or near overflow; nothing was changed"
        )


def _dense(group: Mapping[str, Any]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    """Return the gradients of a group by dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for i, p in enumerate(group["params"]):
        if (grad := p.grad) is not None and grad.numel():
            if grad.layout != torch.strided:
                raise ValueError(f"{name_of(group, i)} has a {grad.layout} gradient; allowed is torch.strided")
            found.setdefault((grad.dtype, grad.device), []).append(grad)
    return found


def _probe(grads: list[Tensor], elementwise: bool) -> Sequence[Tensor]:
    """Return 0-d tensors, Euclidean norms or sums, that are not finite where an entry of a gradient is not.

    On a CPU a sum costs a third of a norm, which counts next to AdamW's single pass. Huge finite entries could
    cancel in a sum, but they do no harm there: no elementwise rule adds up more than two of them.
    """
    if elementwise and grads[0].device.type == "cpu" and grads[0].dtype != torch.float16:
        small = [grad.flatten() for grad in grads if grad.numel() <= SMALL]
        large = [grad.sum() for grad in reversed(grads) if grad.numel() > SMALL]
        return [torch.cat(small).sum(), *large] if small else large
    return lists.norm(grads)


@functools.cache
def _surely(dtype: torch.dtype) -> float:
    """Return the value of a probe below which no entry can be near overflow; above it the entries are looked at."""
    return min(1e19, MARGIN * torch.finfo(dtype).max)


def _fits(grad: Tensor) -> bool:
    """Return whether the largest entry is a number that leaves room for momentum."""
    return not grad.numel() or bool(grad.abs().amax() <= MARGIN * torch.finfo(grad.dtype).max)
