"""Orthogonalization: near the polar factor, at any shape, scale and dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.optim import orthogonalize
from sandbox.optim.orthogonalize import COEFFICIENTS

SHAPES = [(8, 8), (64, 64), (64, 256), (256, 64), (30, 70), (5, 200), (1, 9), (9, 1), (1, 1)]
BAND = {"polar_express": (0.85, 1.15), "newton_schulz": (0.65, 1.25)}  # of the singular values after five steps


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def conditioned(m, n, condition, *, seed=0):
    """Return an (m, n) matrix whose singular values fall geometrically from 1 to 1 / condition, float64."""
    u, _, vh = torch.linalg.svd(randn(m, n, seed=seed, dtype=torch.float64), full_matrices=False)
    return (u * torch.logspace(0, -torch.log10(torch.tensor(float(condition))).item(), min(m, n))) @ vh


def by_singular_values(matrix, method, steps=5):
    """Return what the iteration would give in exact arithmetic: the quintics applied to the singular values."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (matrix.double().norm() * (1.02 if method == "polar_express" else 1.0))
    for a, b, c in COEFFICIENTS[method][:steps]:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


@pytest.mark.parametrize("method", ["polar_express", "newton_schulz"])
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one(method, shape):
    low, high = BAND[method]
    values = torch.linalg.svdvals(orthogonalize(conditioned(*shape, 30).float(), method=method))
    assert low < values.min()
    assert values.max() < high


@pytest.mark.parametrize("method", ["polar_express", "newton_schulz"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("condition", [3, 1e3, 1e6])
def test_float32_agrees_with_the_quintics_on_exact_singular_values(method, shape, condition):
    matrix = conditioned(*shape, condition)
    expected = by_singular_values(matrix, method)
    # The gain of five steps near 0 is about 1e3, on float32's round-off as on everything else.
    torch.testing.assert_close(orthogonalize(matrix.float(), method=method).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_float64_is_the_quintics_to_the_last_digits(shape, steps):
    matrix = conditioned(*shape, 1e3)
    expected = by_singular_values(matrix, "polar_express", steps)
    torch.testing.assert_close(orthogonalize(matrix, steps=steps), expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("shape", [(20, 12), (10, 60)])
def test_more_steps_converge_to_the_polar_factor(shape):
    matrix = conditioned(*shape, 100)
    torch.testing.assert_close(orthogonalize(matrix, steps=9), orthogonalize(matrix, method="svd"), atol=1e-9, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_keeps_to_the_band_too(shape):
    result = orthogonalize(conditioned(*shape, 30).float(), dtype=torch.bfloat16)
    assert result.dtype == torch.float32
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.7
    assert values.max() < 1.2


@pytest.mark.parametrize("method", ["polar_express", "newton_schulz", "svd"])
@given(m=st.integers(1, 24), n=st.integers(1, 24), batch=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_a_stack_is_its_matrices_and_a_transpose_its_transpose(method, m, n, batch, seed):
    matrices = randn(batch, 2, m, n, seed=seed)
    result = orthogonalize(matrices, method=method)
    assert result.shape == matrices.shape
    if method == "svd" and min(m, n) > 1:
        return  # nearly equal singular values leave the factors, though not their span, to round-off
    torch.testing.assert_close(result[-1, 1], orthogonalize(matrices[-1, 1], method=method), atol=1e-4, rtol=0)
    turned = orthogonalize(matrices.mT, method=method)
    torch.testing.assert_close(turned.mT, result, atol=1e-3, rtol=0)


@pytest.mark.parametrize("method", ["polar_express", "newton_schulz", "svd"])
@pytest.mark.parametrize("shape", [(3, 6, 4), (2, 4, 30)])
def test_zero_stays_zero(method, shape):
    assert torch.equal(orthogonalize(torch.zeros(shape), method=method), torch.zeros(shape))


@pytest.mark.parametrize("method", ["polar_express", "newton_schulz", "svd"])
@pytest.mark.parametrize("factor", [1e-6, 1e10, 1e20, 1e37])
def test_scale_is_divided_out_without_overflow(method, factor):
    matrix = randn(8, 40).clamp(-3, 3)
    expected = orthogonalize(matrix, method=method)
    torch.testing.assert_close(orthogonalize(matrix * factor, method=method), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("shape", [(12, 12), (12, 60), (60, 12)])
def test_a_null_space_stays_null(shape):
    matrix = conditioned(*shape, 10)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s[4:] = 0
    matrix = ((u * s) @ vh).float()
    for method in ("polar_express", "newton_schulz", "svd"):
        values = torch.linalg.svdvals(orthogonalize(matrix, method=method))
        assert values[4:].max() < 0.02
        assert values[:4].min() > 0.6


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="did you mean 'polar_express'"):
        orthogonalize(randn(3, 3), method="polar")
    with pytest.raises(ValueError, match="steps=0"):
        orthogonalize(randn(3, 3), steps=0)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        orthogonalize(randn(3))


def test_an_empty_matrix_is_returned_empty():
    assert orthogonalize(torch.zeros(2, 0, 4)).shape == (2, 0, 4)
