"""A parameter as the matrices that its rule sees, and matrices of one shape as one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def check(parameter: Tensor, options: Mapping[str, Any], *, where: str) -> None:
    """Raise a ValueError where the options of a matrix group do not fit one of its parameters."""
    shape, heads, sizes = tuple(parameter.shape), options.get("num_heads") or 1, options.get("split_sizes")
    wrong = None
    rows = shape[-1] if options.get("transposed") and shape else shape[0] if shape else 0
    if len(shape) < 2:
        wrong = "a matrix rule needs two or more dimensions; give vectors algorithm='adamw' or 'lion'"
    elif sum(bool(o) for o in (heads > 1, sizes, options.get("flatten"))) > 1:
        wrong = "num_heads, split_sizes and flatten exclude each other"
    elif options.get("transposed") and options.get("flatten") and len(shape) > 2:
        wrong = "transposed and flatten exclude each other"
    elif (heads > 1 or sizes) and len(shape) != 2:
        wrong = "num_heads and split_sizes need two dimensions"
    elif rows % heads:
        wrong = f"num_heads={heads} has to divide its {rows} rows"
    elif sizes and sum(sizes) != rows:
        wrong = f"split_sizes={sizes} have to add up to its {rows} rows"
    if wrong:
        raise ValueError(f"{where} has shape {shape}: {wrong}")


def views(tensor: Tensor, options: Mapping[str, Any]) -> list[Tensor]:
    """Return the parts of a parameter (or of a state tensor with the same rows) that are updated apart, as views.

    ``transposed``: the weight is stored fan_in x fan_out (Hugging Face's ``Conv1D``) and is seen turned;
    ``num_heads``: one matrix a head; ``split_sizes``: one for each block of rows.
    """
    if options.get("transposed"):
        tensor = tensor.mT
    if (options.get("num_heads") or 1) > 1:
        return [tensor.unflatten(0, (options["num_heads"], -1))]
    return list(tensor.split(options["split_sizes"])) if options.get("split_sizes") else [tensor]


def matrix_shape(view: Tensor, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape ``(..., fan_out, fan_in)`` that the rule sees: with ``flatten``, fan_out x (all the rest)."""
    shape = tuple(view.shape)
    return (shape[0], view[0].numel()) if options.get("flatten") and len(shape) > 2 else shape


@dataclass
class Batch:
    """Matrices of one shape, dtype and device, updated together."""

    shape: tuple[int, ...]  # of each, as the rule sees it
    x: list[Tensor] = field(default_factory=list)  # views of the parameters
    g: list[Tensor] = field(default_factory=list)  # of their gradients
    state: dict[str, list[Tensor]] = field(default_factory=dict)  # of their state

    def stack(self, tensors: list[Tensor]) -> Tensor:
        """Return ``(N, ..., m, n)``; batch dimensions of the parameters are kept apart from N."""
        return torch.stack([t.reshape(*self.shape[:-2], *_last_two(t, self.shape)) for t in tensors])


def _last_two(t: Tensor, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the matrix dimensions of a state tensor: the rule's own, or those of a smaller companion."""
    return shape[-2:] if t.numel() == torch.Size(shape).numel() else tuple(t.shape[-2:])


def batches(parameters: Iterable[Tensor], state: Mapping[Tensor, Mapping[str, Tensor]], options: Mapping[str, Any],
            keys: Iterable[str]) -> Iterator[Batch]:  # fmt: skip
    """Yield the batches of those parameters of a group that have a gradient and any elements."""
    found: dict[Any, Batch] = {}
    for p in parameters:
        if p.grad is None or p.numel() == 0:
            continue
        gradient = p.grad if p.grad.dtype == p.dtype else p.grad.to(p.dtype)
        companions = {key: views(state[p][key], options) for key in keys}
        for i, (x, g) in enumerate(zip(views(p, options), views(gradient, options), strict=True)):
            shape = matrix_shape(x, options)
            batch = found.setdefault((shape, x.dtype, x.device), Batch(shape))
            batch.x.append(x)
            batch.g.append(g)
            for key, parts in companions.items():
                batch.state.setdefault(key, []).append(parts[i])
    yield from found.values()
