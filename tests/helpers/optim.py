"""What the tests of the Dion family share: seeded tensors, and a short run of one optimizer over given gradients."""

import pytest
import torch
from hypothesis import settings

from sandbox.optim import Dion, Dion2, Muon, NorMuon, orthogonalize

ALL = (Muon, NorMuon, Dion2, Dion)
every = pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
iterated = pytest.mark.parametrize("cls", [Muon, NorMuon, Dion2], ids=lambda c: c.__name__)
ROUND_OFF = 2e-5  # float32, over a few steps, where the same sums are taken in another order
small = settings(max_examples=15, deadline=None)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(matrices, epsilon=0.0):
    return orthogonalize(matrices, method="svd")


def trajectory(cls, initial, gradients, *, group=None, **kwargs):
    """Return the parameters after each step of one optimizer with one group over ``initial``, given the gradients."""
    params = [torch.nn.Parameter(x.clone()) for x in initial]
    optimizer = cls([{"params": params, **(group or {})}], **{"lr": 0.1, "weight_decay": 0.1, **kwargs})
    history = []
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
        history.append([p.detach().clone() for p in params])
    return history, optimizer


def assert_same(one, other, tolerance=ROUND_OFF):
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, atol=tolerance, rtol=0)


def gradients_like(tensors, steps=3, scale=1.0):
    return [
        [scale * randn(*t.shape, seed=100 * step + i, dtype=t.dtype) for i, t in enumerate(tensors)]
        for step in range(1, steps + 1)
    ]
