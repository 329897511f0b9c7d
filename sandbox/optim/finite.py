"""The rule for gradients that are not finite: the step is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import lists

MARGIN = 0.01  # of a dtype's largest number: beyond, momentum would soon overflow to inf, and inf - inf is nan


class NonFiniteGradient(ValueError):
    """A gradient holds nan, inf, or a number beyond a hundredth of its dtype's largest; nothing was changed."""


def name_of(group: Mapping[str, Any], i: int) -> str:
    """Return what to call parameter ``i`` of a group in an error."""
    if "param_names" in group:
        return repr(group["param_names"][i])
    kind = group.get("role") or group.get("algorithm")
    return f"parameter {i} of the {kind} group, shape {tuple(group['params'][i].shape)}"


def check(groups: Sequence[Mapping[str, Any]]) -> None:
    """Return if every gradient is dense and finite; one transfer from each device, however many parameters.

    Raises:
        NonFiniteGradient: naming the parameters.
        ValueError: a sparse gradient.
    """
    at = [(g, i, p.grad) for g in groups for i, p in enumerate(g["params"]) if p.grad is not None and p.numel()]
    for group, i, grad in at:
        if grad.layout != torch.strided:
            raise ValueError(f"{name_of(group, i)} has a gradient of layout {grad.layout}; allowed is torch.strided")
    bad = []
    for device in {grad.device for *_, grad in at}:
        here = [(group, i, grad) for group, i, grad in at if grad.device == device]
        largest = torch.stack([v.double() for v in lists.norm([grad for *_, grad in here], float("inf"))]).tolist()
        bad += [
            name_of(group, i)
            for (group, i, grad), value in zip(here, largest, strict=True)
            if not value <= MARGIN * torch.finfo(grad.dtype).max
        ]
    if bad:
        raise NonFiniteGradient(f"the gradient of {', '.join(bad)} is not finite or near overflow; nothing was changed")
