"""What the Dion family does to awkward matrices: zero, tiny, huge, thin, rank-deficient. Nothing of it is ever nan."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.optim import ROUND_OFF, assert_same, every, gradients_like, randn, small, trajectory
from sandbox.optim import Dion, Dion2, Muon, NorMuon


@every
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_zero_gradients_only_decay(cls, decay):
    x = randn(6, 4)
    moved, _ = trajectory(cls, [x, torch.zeros(6, 4)], [[torch.zeros(6, 4)] * 2] * 3, weight_decay=decay)
    torch.testing.assert_close(moved[-1][0], x * (1 - 0.1 * decay) ** 3)
    assert torch.equal(moved[-1][1], torch.zeros(6, 4))


@every
def test_a_gradient_that_follows_zeros_is_as_good_as_a_first_one(cls):
    x, (g,) = torch.zeros(6, 4), gradients_like([randn(6, 4)], steps=1)[0]
    late, _ = trajectory(cls, [x], [[torch.zeros(6, 4)]] * 3 + [[g]])
    first, _ = trajectory(cls, [x], [[g]])
    if cls is not NorMuon:  # whose second moment is scaled away at the first step, not remembered
        torch.testing.assert_close(late[-1][0], first[-1][0], atol=ROUND_OFF, rtol=0)
    assert late[-1][0].norm() == pytest.approx(first[-1][0].norm().item(), rel=1e-4)


@every
@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1), (2, 1, 1), (3, 1, 5)])
def test_one_row_one_column_one_element(cls, shape):
    x = randn(*shape)
    moved, _ = trajectory(cls, [x], gradients_like([x], steps=3))
    assert moved[-1][0].isfinite().all()
    assert (moved[-1][0] - x).abs().sum() > 0


@every
@given(m=st.integers(1, 9), n=st.integers(1, 9), seed=st.integers(0, 99))
@small
def test_the_update_of_the_transpose_is_the_transpose(cls, m, n, seed):
    if cls is NorMuon or m == n:
        return  # NorMuon evens out rows, not columns; square matrices have no shorter side to choose by
    x, grads = randn(m, n, seed=seed), gradients_like([randn(m, n)], steps=2)
    kwargs = {"weight_decay": 0.0} | ({} if cls is Dion else {"adjust_lr": None})
    natural = trajectory(cls, [x], grads, **kwargs)[0][-1][0] - x
    turned = trajectory(cls, [x.mT.contiguous()], [[g.mT] for (g,) in grads], **kwargs)[0][-1][0] - x.mT
    scale = m / n if cls is Dion else 1.0  # Dion's own scale, sqrt(fan_out / fan_in), is always on
    torch.testing.assert_close(natural, turned.mT * scale, atol=1e-4, rtol=1e-4)


@every
@given(rank=st.integers(1, 4), m=st.integers(5, 12), n=st.integers(5, 12), seed=st.integers(0, 99))
@small
def test_a_rank_deficient_gradient_moves_its_own_directions_only(cls, rank, m, n, seed):
    basis = torch.linalg.qr(randn(m, rank, seed=seed)).Q
    gradient = basis @ torch.linalg.qr(randn(n, rank, seed=seed + 1)).Q.mT
    kwargs = {"weight_decay": 0.0} | ({"rank_fraction": 1.0} if cls is Dion else {"adjust_lr": None})
    if cls is Dion2:
        kwargs["fraction"] = 1.0
    moved = trajectory(cls, [torch.zeros(m, n)], [[gradient]], **kwargs)[0][0][0] / -0.1
    assert moved.isfinite().all()
    if cls is Dion:
        moved = moved / math.sqrt(m / n)
    values = torch.linalg.svdvals(moved)
    assert values[rank:].abs().max() < 0.02  # nothing outside of the column space; round-off may grow by 1000
    if cls in (Muon, Dion2):
        assert ((values[:rank] > 0.7) & (values[:rank] < 1.2)).all()
    if cls is not NorMuon:
        torch.testing.assert_close(basis @ (basis.mT @ moved), moved, atol=0.02, rtol=0)


@every
@pytest.mark.parametrize("factor", [1e-4, 1e4, 1e15, 1e35])
def test_the_scale_of_the_gradient_does_not_matter(cls, factor):
    x, grads = torch.zeros(6, 4), gradients_like([randn(6, 4)], steps=3)
    plain, _ = trajectory(cls, [x], grads)
    scaled, _ = trajectory(cls, [x], [[factor * g for g in step] for step in grads])
    assert_same(plain, scaled, tolerance=1e-4)


@every
@pytest.mark.parametrize("factor", [1e-12, 1e-20, 1e-38])
def test_a_vanishing_gradient_fades_out_below_epsilon(cls, factor):
    x, grads = torch.zeros(6, 4), gradients_like([randn(6, 4)], steps=3)
    plain, _ = trajectory(cls, [x], grads)
    faded, _ = trajectory(cls, [x], [[factor * g for g in step] for step in grads])
    assert faded[-1][0].isfinite().all()
    assert faded[-1][0].norm() <= plain[-1][0].norm() * (1 + 1e-4)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(m=st.integers(1, 6), n=st.integers(1, 6), exponent=st.integers(-44, 35), seed=st.integers(0, 99))
@small
def test_no_finite_gradient_puts_nan_into_the_weights(cls, dtype, m, n, exponent, seed):
    x = randn(m, n, seed=seed, dtype=dtype)
    g = (randn(m, n, seed=seed + 1).double() * 10.0**exponent).to(dtype)
    moved, optimizer = trajectory(cls, [x], [[g]] * 3)
    assert moved[-1][0].isfinite().all()
    assert all(t.isfinite().all() for t in optimizer.state.popitem()[1].values())
