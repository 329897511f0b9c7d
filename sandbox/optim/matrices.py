"""A parameter as the matrices that its rule sees, and matrices of one shape as one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Elements of a stack. On a CPU 2 MiB of float32 stay in the cache (a tenth faster than all 24 matrices of width 256 at
# once); elsewhere 128 MiB bound what a step holds beside the state.
LARGEST = {"cpu": 2**19}
LARGEST_ELSEWHERE = 2**25
SPLITS = ("num_heads", "split_sizes")


def check(parameter: Tensor, options: Mapping[str, Any], *, where: str) -> None:
    """Return if the options of a matrix group fit one of its parameters.

    Raises:
        ValueError: they do not.
    """
    shape, heads, sizes = tuple(parameter.shape), options.get("num_heads") or 1, options.get("split_sizes")
    wrong = None
    rows = 0 if not shape else shape[-1] if options.get("transposed") else shape[0]
    if len(shape) < 2:
        wrong = "a matrix rule needs two or more dimensions; give vectors algorithm='adamw' or 'lion'"
    elif sum(bool(o) for o in (heads > 1, sizes, options["flatten"])) > 1:
        wrong = "num_heads, split_sizes and flatten exclude each other"
    elif options.get("transposed") and options["flatten"] and len(shape) > 2:
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
    """Return the parts of a parameter, or of a state tensor with the same rows, that are updated apart, as views.

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
    return (shape[0], view[0].numel()) if options["flatten"] and len(shape) > 2 else shape


@dataclass
class Batch:
    """Matrices of one shape, dtype and device, updated together."""

    shape: tuple[int, ...]  # (..., fan_out, fan_in) of each
    x: list[Tensor] = field(default_factory=list)  # views of the parameters
    g: list[Tensor] = field(default_factory=list)  # and of their gradients
    state: dict[str, list[Tensor]] = field(default_factory=dict)  # and of their state

    def gradient(self) -> Tensor:
        """Return the gradients, ``(N, fan_out, fan_in)``; the batch dimensions of a parameter go into N."""
        return _stack(self.g, self.shape)

    def old(self) -> dict[str, Tensor]:
        """Return the state stacked in the same way; only momentum is shaped like the weight."""
        return {key: _stack(ts, self.shape if key == "momentum" else ts[0].shape) for key, ts in self.state.items()}


def _stack(tensors: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return ``(N, m, n)``; one tensor alone is not copied, since no rule writes into what it is given."""
    shaped = [t if t.shape == shape else t.reshape(shape) for t in tensors]
    stack = torch.stack(shaped) if len(shaped) > 1 else shaped[0].unsqueeze(0)
    return stack if stack.ndim == 3 else stack.flatten(0, -3)


def like(stack: Tensor, targets: list[Tensor]) -> list[Tensor]:
    """Return the parts of a stack ``(N, m, n)`` in the shapes of ``targets``."""
    parts = stack.unbind() if len(stack) == len(targets) else stack.unflatten(0, (len(targets), -1)).unbind()
    return [part if part.shape == t.shape else part.reshape(t.shape) for part, t in zip(parts, targets, strict=True)]


def batches(
    parameters: Iterable[Tensor], state: Mapping[Tensor, Mapping[str, Tensor]], options: Mapping[str, Any]
) -> Iterator[Batch]:
    """Yield the batches of those parameters of a group that have a gradient and any elements."""
    open_: dict[Any, Batch] = {}
    for p in parameters:
        if p.grad is None or p.numel() == 0:
            continue
        gradient = p.grad if p.grad.dtype == p.dtype else p.grad.to(p.dtype)
        # Q belongs to the matrix as a whole; all other state has the rows of the weight
        parts = {key: [t] if key == "Q" else views(t, options) for key, t in state[p].items()}
        for i, (x, g) in enumerate(zip(views(p, options), views(gradient, options), strict=True)):
            shape = matrix_shape(x, options)
            batch = open_.setdefault((shape, x.dtype, x.device), Batch(shape))
            batch.x.append(x)
            batch.g.append(g)
            for key, views_of_state in parts.items():
                batch.state.setdefault(key, []).append(views_of_state[i])
            if (len(batch.x) + 1) * x.numel() > LARGEST.get(x.device.type, LARGEST_ELSEWHERE):
                yield open_.pop((shape, x.dtype, x.device))
    yield from open_.values()
