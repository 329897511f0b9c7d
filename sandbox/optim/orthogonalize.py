"""The nearest semi-orthogonal matrix (polar factor), by a short polynomial iteration or exactly.

An odd quintic p(x) = a x + b x^3 + c x^5 on the singular values moves each of them towards 1 and keeps the singular
vectors. It needs matrix products only. Sources: https://kellerjordan.github.io/posts/muon (the idea),
arXiv 2505.16932 (Polar Express: the best coefficients for each of five steps), https://github.com/microsoft/dion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..fields import near

Method = Literal["polar_express", "newton_schulz", "svd"]

# (a, b, c) of each step. Polar Express: arXiv 2505.16932, Algorithm 1, for five steps with a safety factor of 1.02.
# Newton-Schulz: the five-step set of https://github.com/microsoft/dion.
COEFFICIENTS = {
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    "newton_schulz": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
CONVERGENT = (15 / 8, -10 / 8, 3 / 8)  # the steps after the fifth: p(1) = 1, p'(1) = p''(1) = 0 (arXiv 2505.16932, 3.3)
ELONGATED = 2  # longer over shorter side from which iterating on the small Gram matrix is cheaper (equal work: 1.5)
RENEW = 3  # steps after which the Gram matrix is computed again
ORDINARY = (1e-15, 1e15)  # norms for which float32 holds the squares of the norm and of the entries
Coefficients = tuple[tuple[float, float, float], ...]
SAFETY = {"polar_express": 1.02, "newton_schulz": 1.0}  # the matrix is divided by its norm times this


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for norms and bases: float64 for float64, float32 for every other floating dtype."""
    return torch.promote_types(dtype, torch.float32)


def default_dtype(matrices: Tensor) -> torch.dtype:
    """Return the dtype to iterate in: bfloat16 on CUDA, which has units for it, else float32; float64 stays."""
    return (
        torch.bfloat16 if matrices.device.type == "cuda" and matrices.dtype != torch.float64 else wide(matrices.dtype)
    )


def orthogonalize(
    matrices: Tensor,
    *,
    method: Method = "polar_express",
    steps: int = 5,
    dtype: torch.dtype | None = None,
    epsilon: float = 1e-8,
) -> Tensor:
    """Return the nearest semi-orthogonal matrix for each matrix of a batch; a zero matrix stays zero.

    Args:
        matrices: ``(..., m, n)``, any floating dtype, finite.
        method: ``"polar_express"`` and ``"newton_schulz"`` bring the singular values into about 0.7 to 1.2;
            ``"svd"`` is exact, slow, and for studies.
        steps: of the iteration. The coefficients are made for five; from the sixth on a convergent quintic is used.
        dtype: to compute in; None takes float32 on CPU and bfloat16 on CUDA (float64 stays). SVD: float32 or float64.
        epsilon: the least divisor. A matrix of smaller Frobenius norm is not blown up to full size.

    Returns:
        ``(..., m, n)`` of the dtype of ``matrices``.

    Raises:
        ValueError: an unknown method, no step, or fewer than two dimensions.
    """
    if matrices.ndim < 2:
        raise ValueError(f"shape {tuple(matrices.shape)} was given to orthogonalize; needed is (..., m, n)")
    if matrices.numel() == 0:
        return torch.zeros_like(matrices)
    stack = matrices.reshape(-1, *matrices.shape[-2:])
    (result,) = orthogonalize_all([stack], method=method, steps=steps, dtype=dtype, epsilon=epsilon)
    return result.reshape(matrices.shape)


def orthogonalize_all(
    stacks: Sequence[Tensor],
    *,
    method: Method = "polar_express",
    steps: int = 5,
    dtype: torch.dtype | None = None,
    epsilon: float = 1e-8,
) -> list[Tensor]:
    """Return ``orthogonalize`` of each stack ``(N, m, n)``, none empty; long ones with equal shorter sides share work.

    Raises:
        ValueError: an unknown method, or no step.
    """
    if method != "svd" and method not in COEFFICIENTS:
        raise ValueError(f"method={method!r} was given for orthogonalize: {near(str(method), [*COEFFICIENTS, 'svd'])}")
    if steps < 1:
        raise ValueError(f"steps={steps} was given for orthogonalize; needed are steps >= 1")
    if method == "svd":
        return [_exact(stack) for stack in stacks]
    coefficients = COEFFICIENTS[method][:steps] + (CONVERGENT,) * (steps - 5)
    xs = [_normalized(stack.to(dtype or default_dtype(stack)), SAFETY[method], epsilon) for stack in stacks]
    elongated: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        short, long = sorted(x.shape[-2:])
        if long >= ELONGATED * short and x.dtype in (torch.float32, torch.float64):
            elongated.setdefault((short, x.dtype, x.device), []).append(i)
        else:
            xs[i] = _direct(x, coefficients)
    for members in elongated.values():
        for i, x in zip(members, _by_gram([xs[i] for i in members], coefficients), strict=True):
            xs[i] = x
    return [x.to(stack.dtype) for x, stack in zip(xs, stacks, strict=True)]


def largest_entry(x: Tensor) -> Tensor:
    """Return the largest absolute entry of each matrix, ``(..., 1, 1)``, above 0."""
    # vector_norm with ord=inf gives the same, 30 times slower on a CPU
    largest = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    return largest.clamp_min(torch.finfo(x.dtype).tiny)


def _exact(matrices: Tensor) -> Tensor:
    """Return U V^T of the singular value decomposition, without the singular values that are round-off."""
    exact = matrices.to(wide(matrices.dtype))
    exact = exact / largest_entry(exact)
    u, s, vh = torch.linalg.svd(exact, full_matrices=False)
    floor = s.amax(-1, keepdim=True) * max(matrices.shape[-2:]) * torch.finfo(exact.dtype).eps
    return ((u * (s > floor).unsqueeze(-2)) @ vh).to(matrices.dtype)


def _normalized(x: Tensor, safety: float, epsilon: float) -> Tensor:
    """Return x over ``safety * norm``, or over epsilon where that is more, without overflow for any finite x."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide(x.dtype))
    least: float | Tensor = epsilon
    low, high = ORDINARY
    # the look at the norms would make the CPU wait for a GPU
    if x.device.type != "cpu" or not all(low < n < high for n in norm.flatten().tolist()):
        largest = largest_entry(x)
        x, least = x / largest, epsilon / largest
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide(x.dtype))
    return x * (norm * safety).clamp_min(least).reciprocal().to(x.dtype)


def _tall(x: Tensor) -> bool:
    return x.shape[-2] > x.shape[-1]


def _gram(x: Tensor) -> Tensor:
    """Return the Gram matrix of the shorter side."""
    return torch.bmm(x.mT, x) if _tall(x) else torch.bmm(x, x.mT)


def _direct(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Apply each quintic to the matrix itself: x <- a x + (b A + c A^2) x, A the Gram matrix of the shorter side."""
    tall = _tall(x)
    for a, b, c in coefficients:
        gram = _gram(x)
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, p, beta=a) if tall else torch.baddbmm(x, p, x, beta=a)
    return x


def _by_gram(xs: list[Tensor], coefficients: Coefficients) -> list[Tensor]:
    """Apply the quintics to the small Gram matrices A of all xs, and to each x only their product Q, every third step.

    With P = b A + c A^2 a step is x <- a x + P x, hence A <- (a + P) A (a + P); all of these commute. The round-off in
    A starts at about 1e-7 of its largest eigenvalue. Where a singular value is small, each step multiplies it by a^2:
    after three steps it is about 1e-4, after five 2e-3. So A is computed again from x every third step.
    """
    for start in range(0, len(coefficients), RENEW):
        grams = [_gram(x) for x in xs]
        gram = q = torch.cat(grams) if len(grams) > 1 else grams[0]  # the first step sets q
        part = coefficients[start : start + RENEW]
        for step, (a, b, c) in enumerate(part, start=1):
            p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            if step > 1:
                q = torch.baddbmm(q, q, p, beta=a)
            if step < len(part):
                half = torch.baddbmm(gram, gram, p, beta=a)
                gram = torch.baddbmm(half, half, p, beta=a)
            if step == 1:
                q = p
                q.diagonal(dim1=-2, dim2=-1).add_(a)
        qs = q.split([len(x) for x in xs])
        xs = [torch.bmm(x, q) if _tall(x) else torch.bmm(q, x) for x, q in zip(xs, qs, strict=True)]
    return xs
