"""Elementwise operations on lists of tensors in one dispatch, where torch has them.

``torch.optim`` uses the same ``torch._foreach_*`` functions; their names are private, hence the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def foreach(name: str) -> Callable[..., Any]:
    """Return ``torch._foreach_<name>``, or a loop over the tensor method of that name where torch has none."""
    return getattr(torch, f"_foreach_{name}", None) or loop(name)


def loop(name: str) -> Callable[..., Any]:
    """Return a function that calls the tensor method ``name`` on each tensor; list arguments give one item each."""

    def each(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        at = [[a[i] if isinstance(a, list | tuple) else a for a in args] for i in range(len(tensors))]
        return [getattr(torch.Tensor, name)(t, *at[i], **kwargs) for i, t in enumerate(tensors)]

    return each


add_, mul_, copy_, sign_, lerp_ = map(foreach, ("add_", "mul_", "copy_", "sign_", "lerp_"))
add, lerp, norm = map(foreach, ("add", "lerp", "norm"))
