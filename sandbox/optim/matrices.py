"""Parameters as the matrices that a rule sees, and matrices of one shape as one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import lists

# The most elements of a stack. On a CPU 2 MiB of float32 stay in the cache, which is a tenth faster than all 24
# matrices of width 256 at once; elsewhere 128 MiB limit the memory that a step takes besides the state.
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
    """Return, as views, the parts of a parameter (or of a state tensor with its rows) that are updated separately.

    ``transposed``: the weight is stored fan_in x fan_out (Hugging Face's ``Conv1D``), so the view is its transpose.
    ``num_heads``: one matrix for each head. ``split_sizes``: one for each block of rows.
    """
    if options.get("transposed"):
        tensor = tensor.mT
    if (options.get("num_heads") or 1) > 1:
        return [tensor.unflatten(0, (options["num_heads"], -1))]
    return list(tensor.split(options["split_sizes"])) if options.get("split_sizes") else [tensor]


def matrix_shape(view: Tensor, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape ``(..., fan_out, fan_in)`` that the rule sees; ``flatten`` makes it fan_out x (the rest)."""
    shape = tuple(view.shape)
    return (shape[0], view[0].numel()) if options["flatten"] and len(shape) > 2 else shape


@dataclass
class Batch:
    """Matrices of one shape, dtype and device, whose directions are found together."""

    shape: tuple[int, ...]  # (..., fan_out, fan_in) of each
    x: list[Tensor] = field(default_factory=list)  # views of the parameters
    g: list[Tensor] = field(default_factory=list)  # and of their gradients
    state: list[Mapping[str, Tensor]] = field(default_factory=list)  # and of their state

    def old(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return some of the state, stacked; never the momentum, which has the weight's shape, not the rule's."""
        return {key: stack([state[key] for state in self.state]) for key in keys}

    def set(self, key: str, value: Tensor) -> None:
        """Write a stack back into the state."""
        targets = [state[key] for state in self.state]
        lists.copy_(targets, like(value, targets))


def stack(tensors: Sequence[Tensor], shape: tuple[int, ...] | None = None) -> Tensor:
    """Return ``(N, m, n)``; batch dims of a tensor count into N. One alone is not copied, as no rule writes to it."""
    shaped = [t if shape in (None, t.shape) else t.reshape(shape) for t in tensors]
    stacked = torch.stack(shaped) if len(shaped) > 1 else shaped[0].unsqueeze(0)
    return stacked if stacked.ndim == 3 else stacked.flatten(0, -3)


def like(stacked: Tensor, targets: list[Tensor]) -> list[Tensor]:
    """Return the parts of a stack ``(N, m, n)`` in the shapes of ``targets``."""
    parts = stacked.unbind() if len(stacked) == len(targets) else stacked.unflatten(0, (len(targets), -1)).unbind()
    return [part if part.shape == t.shape else part.reshape(t.shape) for part, t in zip(parts, targets, strict=True)]


def batches(
    parameters: Iterable[Tensor], state: Mapping[Tensor, Mapping[str, Tensor]], options: Mapping[str, Any]
) -> Iterator[Batch]:
    """Yield the batches of the parameters of a group; those without a gradient or without elements are left out."""
    open_: dict[Any, Batch] = {}
    whole = not any(options.get(key) for key in ("transposed", *SPLITS))
    for p in parameters:
        gradient = p.grad
        if gradient is None or p.numel() == 0:
            continue
        if gradient.dtype != p.dtype:
            gradient = gradient.to(p.dtype)
        parts = ((p, gradient, state[p]),) if whole else _parts(p, gradient, state[p], options)
        for x, g, own in parts:
            key = (matrix_shape(x, options), x.dtype, x.device)
            batch = open_.get(key) or open_.setdefault(key, Batch(key[0]))
            batch.x.append(x)
            batch.g.append(g)
            batch.state.append(own)
            if (len(batch.x) + 1) * x.numel() > _largest(x):
                yield open_.pop(key)
    yield from open_.values()


def bundles(
    parameters: Iterable[Tensor], state: Mapping[Tensor, Mapping[str, Tensor]], options: Mapping[str, Any]
) -> Iterator[list[Batch]]:
    """Yield those batches in lists: small ones together, since each torch call costs more than its arithmetic."""
    bundle: list[Batch] = []
    size = 0
    for batch in batches(parameters, state, options):
        elements = len(batch.x) * batch.x[0].numel()
        if bundle and size + elements > _largest(batch.x[0]):
            yield bundle
            bundle, size = [], 0
        bundle.append(batch)
        size += elements
    if bundle:
        yield bundle


def _parts(
    p: Tensor, gradient: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]
) -> Iterable[tuple[Tensor, Tensor, Mapping[str, Tensor]]]:
    """Return the parameter, gradient and state of each separately updated part of a parameter."""
    # Q belongs to the matrix as a whole; all other state has the rows of the weight
    apart = [[t] if key == "Q" else views(t, options) for key, t in state.items()]
    own = (dict(zip(state, ts, strict=True)) for ts in zip(*apart, strict=True))
    return zip(views(p, options), views(gradient, options), own, strict=True)


def _largest(x: Tensor) -> int:
    return LARGEST.get(x.device.type, LARGEST_ELSEWHERE)
