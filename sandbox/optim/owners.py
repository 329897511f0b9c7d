"""Which rank orthogonalizes which matrix, balanced by cost; every rank and ``plan`` get the same answer."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

STEPS = 5  # of the orthogonalization


def operations(shape: Sequence[int], options: Mapping[str, Any], *, rule: str) -> float:
    """Return the floating-point operations of one update of a parameter by a matrix rule; a multiply-add counts as 2.

    With s and l the shorter and the longer side, an iteration step is s x l x s (the Gram matrix), s^3 (its square) and
    s x s x l, twice each: 4 s^2 l + 2 s^3. Dion has four products of 2 s l r and a QR of 4 l r^2 at rank r (arXiv
    2504.05295, Algorithm 1); Dion2 iterates on a fraction of the shorter side.
    """
    if options.get("flatten") and len(shape) > 2:
        shape = (shape[0], math.prod(shape[1:]))
    count, (s, l) = math.prod(shape[:-2]), sorted(shape[-2:])  # noqa: E741
    heads = options.get("num_heads") or 1
    if heads > 1 and rule != "dion":
        count, (s, l) = count * heads, sorted((shape[-2] // heads, shape[-1]))  # noqa: E741
    if rule == "dion":
        r = min(s, math.ceil(options.get("rank_fraction", 1.0) * s))
        return count * (2.0 * s * l * r * (2 * options.get("power_iters", 1) + 2) + 4.0 * l * r * r)
    if rule == "dion2":
        s = max(1, math.ceil(options.get("fraction", 0.25) * s)) if s else 0
    return count * STEPS * (4.0 * s * s * l + 2.0 * s**3)


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the owner of each item: the most expensive first, each to the rank with the least work so far.

    At most 4/3 of the best possible maximum (Graham 1969, doi:10.1137/0117039); ties go to the lower number.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        owners[i] = rank
        heapq.heappush(loads, (load + costs[i], rank))
    return owners


def cuts(rows: int, ranks: int) -> list[int]:
    """Return how many of ``rows`` each rank holds; ``Shard`` cuts as ``torch.chunk`` does: the last ranks get less."""
    size = -(-rows // ranks)
    return [max(0, min(size, rows - rank * size)) for rank in range(ranks)]
