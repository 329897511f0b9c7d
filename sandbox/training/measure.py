"""What is measured while a run trains: losses, the sizes of weights and updates by role, and the time of each part.

A measurement only reads: it changes neither the weights nor any random generator.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Batch
from ..records import RunRecord
from .environment import peak_bytes
from .world import World, part

PARTS = ("data", "forward_backward", "optimizer", "evaluation")  # of the time of a run

Loss = Callable[[Tensor, Tensor], Tensor]  # (x_BT, y_BT) -> mean loss in nats/token, 0-d


class Clock:
    """Seconds that each part of the training has taken."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.parts = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add what the body takes to a part."""
        start = time.perf_counter()
        yield
        self.parts[part] += time.perf_counter() - start

    def timing(self, steps: int, tokens_a_step: int, device: str) -> dict[str, float]:
        """Return the ``timing`` of a record after ``steps`` steps: milliseconds a step, tokens/s, seconds, bytes."""
        seconds = time.perf_counter() - self.start
        trained = seconds - self.parts["evaluation"]
        return {f"{part}_ms": 1e3 * value / max(1, steps) for part, value in self.parts.items()} | {
            "tokens_per_second": steps * tokens_a_step / trained,
            "seconds": seconds,
            "peak_bytes": peak_bytes(device),
        }


class Columns:
    """The columns of a record, to which a run appends its numbers."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        record.curve = {"step": [], "tokens": [], "train_loss": [], "factor": []}
        record.evaluations = {"step": [], "val_loss": [], "val_bpb": []}
        record.rms = {"step": [], "role": [], "weight": [], "gradient": [], "update": []}

    def append(self, name: str, *row: Any) -> None:
        """Append a row to the columns ``curve``, ``evaluations`` or ``rms``."""
        for column, value in zip(getattr(self.record, name).values(), row, strict=True):
            column.append(value)

    def last(self, step: int) -> dict[str, float]:
        """Return the last row of the curve, with the losses of an evaluation if there was one at ``step``."""
        row = {column: values[-1] for column, values in self.record.curve.items()}
        if self.record.evaluations["step"][-1:] == [step]:
            row |= {column: values[-1] for column, values in self.record.evaluations.items()}
        return row


@torch.no_grad()
def validation_loss(
    model: nn.Module, loss: Loss, batches: list[Batch], world: World, rows: slice, device: str
) -> float:
    """Return the mean loss over ``batches`` in nats/token, the same on every rank; ``rows`` are those of this rank."""
    model.eval()
    losses = [world.mean(loss(x[rows].to(device), y[rows].to(device))) for x, y in batches]
    model.train()
    world.settle(model)
    return math.fsum(losses) / len(losses)


def weights_of(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return copies of what this rank holds of every weight, by group."""
    return [[part(p).clone() for p in group["params"]] for group in optimizer.param_groups]


@torch.no_grad()
def rms_by_role(
    optimizer: torch.optim.Optimizer, before: list[list[Tensor]], world: World, device: str
) -> dict[str, list[float]]:
    """Return the root mean squares of weight, gradient and last update, by role.

    Args:
        optimizer: after its step, with the gradients still there.
        before: ``weights_of`` the optimizer before the step.
        world: the ranks that hold the shards.
        device: on which the ranks add up.
    """
    sums: dict[str, list[float]] = {}
    for group, olds in zip(optimizer.param_groups, before, strict=True):
        row = sums.setdefault(group.get("role", "all"), [0.0] * 4)
        for p, old in zip(group["params"], olds, strict=True):
            new, grad = part(p), torch.zeros(()) if p.grad is None else part(p.grad)
            squares = (float(t.float().square().sum()) for t in (new, grad, new - old))
            row[:] = [new.numel() + row[0], *(a + b for a, b in zip(row[1:], squares, strict=True))]
    found = {}
    for role, row in sums.items():
        count, *totals = world.sum_shards(row, device)
        found[role] = [math.sqrt(total / count) for total in totals]
    return found
