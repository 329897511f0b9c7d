"""A step on several ranks: each matrix is put together on the one rank that owns it, all else stays where it is.

Momentum is elementwise, so each rank updates its own part. The parts of what is orthogonalized are sent to the
matrix's owner, in one collective for all matrices of a dtype. The owner applies the rule of ``base`` unchanged, and a
second collective brings the directions back. Replicated parameters need only the second one. State is cut as its
parameter is. The idea of owners of whole matrices: https://github.com/microsoft/dion, README.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from . import finite, lists, matrices, owners
from .options import SCALAR, scale
from .orthogonalize import wide
from .ranks import Ranks
from .scalar import decay_


def ranks_of(mesh: Any, name: str) -> Ranks | None:
    """Return the ranks behind a one-dimensional DeviceMesh or a ProcessGroup; None for a single process.

    Raises:
        ValueError: a mesh of several axes.
    """
    size = mesh.size() if callable(getattr(mesh, "size", None)) else 1
    if mesh is None or size == 1:
        return None
    if getattr(mesh, "ndim", 1) != 1:
        raise ValueError(f"{name}: a mesh of {mesh.ndim} axes was given; allowed is one (sandbox.mesh.get_dion_mesh)")
    if not (hasattr(mesh, "get_group") or isinstance(mesh, dist.ProcessGroup)):
        raise ValueError(
            f"{name}: a mesh of {size} ranks was given, a {type(mesh).__name__}; allowed: DeviceMesh, ProcessGroup"
        )
    return Ranks(mesh.get_group() if hasattr(mesh, "get_group") else mesh)


def check(p: Tensor, ranks: Ranks | None, *, where: str) -> None:
    """Return if a parameter is whole, or cut along one dim by exactly these ranks.

    Raises:
        ValueError: it is sharded otherwise.
    """
    if not isinstance(p, DTensor):
        return
    cut = [i for i, placed in enumerate(p.placements) if p.device_mesh.size(i) > 1 and not placed.is_replicate()]
    if not cut:
        return
    if len(cut) > 1 or not isinstance(p.placements[cut[0]], Shard):
        raise ValueError(f"{where} has the placements {p.placements}; allowed is one Shard over the optimizer's mesh")
    if ranks is None:
        raise ValueError(f"{where} is sharded over {p.device_mesh.size(cut[0])} ranks; pass that mesh to the optimizer")
    own = dist.get_process_group_ranks(p.device_mesh.get_group(cut[0]))
    if own != dist.get_process_group_ranks(ranks.group):
        raise ValueError(f"{where} is sharded over the ranks {own}; the optimizer's mesh has others")


def axis_of(p: Tensor) -> tuple[int, int] | None:
    """Return the mesh axis that cuts a parameter and the dim that it cuts; None where this rank holds all of it."""
    if isinstance(p, DTensor):
        for axis, placed in enumerate(p.placements):
            if p.device_mesh.size(axis) > 1 and isinstance(placed, Shard):
                return axis, placed.dim % p.ndim
    return None


def _dim(p: Tensor) -> int | None:
    axis = axis_of(p)
    return None if axis is None else axis[1]


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, sharing memory, without gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def place(p: Tensor, key: str, whole: Tensor) -> Tensor:
    """Return a whole state tensor as it is stored for ``p``: cut as the weight is, Q by its rows, otherwise whole."""
    axis = axis_of(p)
    if axis is None or not isinstance(p, DTensor):
        return whole
    dim = 0 if key == "Q" else axis[1]
    if key != "Q" and (dim >= whole.ndim or whole.shape[dim] != p.shape[dim]):
        return whole
    mesh, placements = p.device_mesh, list(p.placements)
    size, rank = mesh.size(axis[0]), mesh.get_local_rank(axis[0])
    placements[axis[0]] = Shard(dim)
    part = whole.split(owners.cuts(whole.shape[dim], size), dim)[rank].contiguous().clone()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


@dataclass
class Matrix:
    """One matrix parameter in this step."""

    group: dict[str, Any]
    x: Tensor  # what this rank holds of the parameter
    state: dict[str, Tensor]  # and of its state
    shape: tuple[int, ...]  # of the whole
    dim: int | None  # along which it is cut; None: it is whole here
    owner: int
    sent: Tensor | None = None  # the part that this rank sends to the owner
    rows: Tensor | None = None  # indices along dim that Dion2 has chosen on this shard
    sizes: list[int] = field(default_factory=list)  # along dim, of the part that each rank sends
    layout: dict[str, tuple[tuple[int, ...], int | None]] = field(default_factory=dict)  # of state: whole shape, dim

    def cut(self, key: str, ranks: int) -> tuple[tuple[int, ...], int | None, list[int]]:
        """Return whole shape, dim and each rank's size along it, of the direction ("x") or of a state tensor."""
        if key == "x":
            sizes = list(self.shape)
            if self.dim is not None:
                sizes[self.dim] = sum(self.sizes)
            return tuple(sizes), self.dim, self.sizes
        shape, dim = self.layout[key]
        return shape, dim, [] if dim is None else owners.cuts(shape[dim], ranks)


def step(optimizer: Any, ranks: Ranks) -> None:
    """Take one step of a ``base.DionFamily`` optimizer together with the other ranks.

    Raises:
        NonFiniteGradient: on every rank, if any rank has one; nothing was changed.
        ranks.RankMissing: a rank took no part within the time-out.
        ValueError: the ranks hold different parameters, or none has any gradient.
    """
    held = [[local(p) for p in group["params"]] for group in optimizer.param_groups]
    _agree(optimizer, ranks, held)
    found = []
    for group, xs in zip(optimizer.param_groups, held, strict=True):
        group["step"] += 1
        shadow = {**group, "params": xs}
        state = {
            x: {k: local(v) for k, v in optimizer.state[p].items()} for x, p in zip(xs, group["params"], strict=True)
        }
        if group["algorithm"] in SCALAR:
            optimizer._step_scalars(shadow, state)
            continue
        for x, p in zip(xs, group["params"], strict=True):
            if x.grad is not None and p.numel():
                layout = {key: (tuple(value.shape), _dim(value)) for key, value in optimizer.state[p].items()}
                owner = optimizer._owners[p]
                found.append(Matrix(group, x, state[x], tuple(p.shape), _dim(p), owner, layout=layout))
    kinds: dict[Any, list[Matrix]] = {}
    for matrix in found:
        kinds.setdefault((matrix.x.dtype, matrix.x.device), []).append(matrix)
    for same in kinds.values():
        _step_matrices(optimizer, ranks, same)


def own(optimizer: Any, ranks: Ranks) -> dict[Tensor, int]:
    """Return the owner of every matrix parameter of an optimizer."""
    at = [(p, group) for group in optimizer.param_groups if group["algorithm"] not in SCALAR for p in group["params"]]
    costs = [owners.operations(tuple(p.shape), group, rule=group["algorithm"]) for p, group in at]
    return {p: owner for (p, _), owner in zip(at, owners.assign(costs, ranks.size), strict=True)}


def _agree(optimizer: Any, ranks: Ranks, held: list[list[Tensor]]) -> None:
    """Set the gradient of every part in ``held`` so that all ranks agree on it, or raise the same refusal on all.

    A shard without gradient counts as zero where another shard has one. A replicated parameter without gradient takes
    it from the lowest rank that has one. Where no rank has one, the parameter is left out of this step.
    """
    groups = [{**group, "params": xs} for group, xs in zip(optimizer.param_groups, held, strict=True)]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    flat = list(zip(parameters, itertools.chain.from_iterable(held), strict=True))
    for p, x in flat:
        if p.grad is not None:
            grad = local(p.grad)
            x.grad = grad if grad.dtype == x.dtype else grad.to(x.dtype)
    if optimizer._owners is None:
        _compare(ranks, parameters)
        optimizer._owners = own(optimizer, ranks)
    error = None
    try:
        finite.check(groups)
    except ValueError as caught:
        error = caught
    said = ranks.agree([error is not None, *(x.grad is not None for _, x in flat)])
    bad = [rank for rank, (failed, *_) in enumerate(said) if failed]
    if error is not None:
        raise error
    if bad:
        raise finite.NonFiniteGradient(
            f"a gradient on rank {bad[0]} is not finite or near overflow; nothing was changed"
        )
    if not any(itertools.chain.from_iterable(has for _, *has in said)):
        raise ValueError(
            "no parameter has a gradient on any rank; was the optimizer built before the model was sharded?"
        )
    lent: dict[int, list[tuple[int, Tensor]]] = {}
    for i, (p, x) in enumerate(flat):
        having = [rank for rank, (_, *has) in enumerate(said) if has[i]]
        if not having or len(having) == ranks.size:
            continue
        if axis_of(p) is not None:
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad
        else:
            x.grad = torch.empty_like(x) if x.grad is None else x.grad
            lent.setdefault(having[0], []).append((i, x))
    for source, parts in sorted(lent.items()):
        for i, x in parts:
            lacking = [rank for rank in range(ranks.size) if not said[rank][1 + i]]
            grad = x if x.grad is None else x.grad  # set above
            out = [[grad] if ranks.rank == source and rank in lacking else [] for rank in range(ranks.size)]
            sizes = [x.numel() if rank == source and ranks.rank in lacking else 0 for rank in range(ranks.size)]
            got = ranks.exchange(out, sizes, x)
            if ranks.rank in lacking:
                x.grad = got[source].view(x.shape)


def _compare(ranks: Ranks, parameters: Iterable[Tensor]) -> None:
    """Raise a ValueError on every rank where ranks hold different parameters, which would later wait for ever."""
    text = str([(tuple(p.shape), str(p.dtype)) for p in parameters])
    said = ranks.agree(list(zlib.crc32(text.encode()).to_bytes(4, "big")))
    other = [rank for rank, word in enumerate(said) if word != said[0]]
    if other:
        raise ValueError(f"ranks {other} hold other parameters than rank 0, by shape or order; allowed is one model")


def _step_matrices(optimizer: Any, ranks: Ranks, found: list[Matrix]) -> None:
    """Update all matrices of one dtype and device: momentum here, the rule at the owners, the weights here again."""
    for matrix in found:
        _contribute(optimizer, ranks, matrix)
    whole = _pull(ranks, found, lambda m: {"x": m.sent} | {key: m.state[key] for key in optimizer.extras})
    answers = _solve(optimizer, [m for m in found if m.owner == ranks.rank], whole)
    for matrix, parts in zip(found, _push(optimizer, ranks, found, answers), strict=True):
        _apply(matrix, parts)


def _contribute(optimizer: Any, ranks: Ranks, m: Matrix) -> None:
    """Update the momentum of this rank's part, and set what it sends to the owner."""
    m.sizes = owners.cuts(m.shape[m.dim], ranks.size) if m.dim is not None else []
    (m.sent,), (momentum,) = optimizer._accumulate([m.x.grad], [m.state["momentum"]], m.group)
    m.state["momentum"].copy_(momentum)
    if m.dim is not None and _chooses_locally(optimizer, m):
        count = max(1, math.ceil(m.group["fraction"] * m.sizes[0]))  # of the largest shard's rows, as upstream
        m.sizes = [min(count, size) for size in m.sizes]
        norms = torch.linalg.vector_norm(m.sent, 1, dim=1 - m.dim, dtype=wide(m.sent.dtype))
        m.rows = norms.topk(m.sizes[ranks.rank], sorted=False).indices.sort().values
        m.sent = m.sent.index_select(m.dim, m.rows)
        m.state["momentum"].index_copy_(m.dim, m.rows, m.sent * m.group["ef_decay"])


def _chooses_locally(optimizer: Any, m: Matrix) -> bool:
    plain = len(m.shape) == 2 and not m.group.get("transposed") and (m.group.get("num_heads") or 1) == 1
    return optimizer.algorithm == "dion2" and m.group["selection_scope"] == "local" and m.dim is not None and plain


def _pull(ranks: Ranks, found: list[Matrix], parts: Any) -> dict[int, dict[str, Tensor]]:
    """Return the whole tensors of every matrix that this rank owns, by position in ``found``; one collective."""
    out: list[list[Tensor]] = [[] for _ in range(ranks.size)]
    sizes, plan = [0] * ranks.size, []
    whole: dict[int, dict[str, Tensor]] = {}
    for i, m in enumerate(found):
        for key, tensor in parts(m).items():
            shape, dim, cut = m.cut(key, ranks.size)
            if dim is None:
                if m.owner == ranks.rank:
                    whole.setdefault(i, {})[key] = tensor
                continue
            out[m.owner].append(tensor)
            if m.owner == ranks.rank:
                shapes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in cut]
                plan.append((i, key, dim, shapes))
                for rank, part in enumerate(shapes):
                    sizes[rank] += torch.Size(part).numel()
    if any(m.dim is not None for m in found):  # otherwise every rank holds every matrix whole
        received, at = ranks.exchange(out, sizes, found[0].x), [0] * ranks.size
    for i, key, dim, shapes in plan:
        pieces = []
        for rank, shape in enumerate(shapes):
            count = torch.Size(shape).numel()
            pieces.append(received[rank][at[rank] : at[rank] + count].view(shape))
            at[rank] += count
        whole.setdefault(i, {})[key] = torch.cat(pieces, dim)
    return {position: whole[i] for position, i in enumerate(sorted(whole))}


def _solve(optimizer: Any, mine: list[Matrix], whole: Mapping[int, dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return, for each matrix owned here, the scaled direction ("x") and the state to send back, both whole."""
    answers: list[dict[str, Tensor]] = []
    by_group: dict[int, list[tuple[Matrix, Tensor, dict[str, Tensor]]]] = {}
    for m, parts in zip(mine, (whole[i] for i in sorted(whole)), strict=True):
        direction = torch.empty_like(parts["x"])
        if m.rows is not None:  # its rows are chosen already; only to orthogonalize them is left
            orth = optimizer._orthogonalizer(m.group)
            answers.append({"x": orth([parts["x"].unsqueeze(0)])[0][0] * _scale(m)})
            continue
        direction.grad = parts["x"]
        state = {"momentum": torch.empty_like(direction)} | {key: parts[key].clone() for key in optimizer.extras}
        answers.append({"x": direction, **state})
        by_group.setdefault(id(m.group), []).append((m, direction, state))
    for members in by_group.values():
        group, states = members[0][0].group, {direction: state for _, direction, state in members}
        for bundle in matrices.bundles(list(states), states, group):
            found = optimizer._solve(bundle, [g for batch in bundle for g in batch.g], group)
            for batch, directions in zip(bundle, found, strict=True):
                lists.copy_(batch.x, directions)
                lists.mul_(batch.x, scale(batch.shape, group.get("adjust_lr", "spectral_norm")))
    return answers


def _scale(m: Matrix) -> float:
    return scale(m.shape, m.group.get("adjust_lr", "spectral_norm"))


def _push(
    optimizer: Any, ranks: Ranks, found: list[Matrix], answers: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Return, for every matrix, this rank's part of its owner's answer; one collective."""
    out: list[list[Tensor]] = [[] for _ in range(ranks.size)]
    sizes, plan, solved = [0] * ranks.size, [], iter(answers)
    for i, m in enumerate(found):
        answer = next(solved) if m.owner == ranks.rank else None
        for key in ("x", *(optimizer.returned if m.rows is None else ())):
            shape, dim, cut = m.cut(key, ranks.size)
            if answer is not None:
                parts = [answer[key]] * ranks.size if dim is None else answer[key].split(cut, dim)
                for rank, part in enumerate(parts):
                    out[rank].append(part)
            mine = shape if dim is None else (*shape[:dim], cut[ranks.rank], *shape[dim + 1 :])
            sizes[m.owner] += torch.Size(mine).numel()
            plan.append((i, key, m.owner, torch.Size(mine)))
    received, at = ranks.exchange(out, sizes, found[0].x), [0] * ranks.size
    result: list[dict[str, Tensor]] = [{} for _ in found]
    for i, key, owner, shape in plan:
        result[i][key] = received[owner][at[owner] : at[owner] + shape.numel()].view(shape)
        at[owner] += shape.numel()
    return result


def _apply(m: Matrix, parts: dict[str, Tensor]) -> None:
    """Decay this rank's part with the unscaled rate, then subtract the direction, which is scaled already."""
    direction = parts.pop("x")
    if m.rows is not None and m.dim is not None:
        direction = torch.zeros_like(m.x).index_copy_(m.dim, m.rows, direction)
    for key, value in parts.items():
        m.state[key].copy_(value)
    lr = float(m.group["lr"])
    decay_([m.x], [direction], rate=lr * float(m.group["weight_decay"]), cautious=m.group["cautious_wd"])
    m.x.add_(direction, alpha=-lr)
