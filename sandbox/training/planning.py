"""What a run will hold, compute and send on each rank, computed from shapes alone, before anything is launched.

The placement is that of ``world`` (FSDP2 cuts along the first dim) and of ``optim.sharded`` (one owner for each
matrix). Tests compare the numbers with the bytes that ranks really hold and send.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from ..config import AdamWConfig, Dion2Config, DionConfig, MeshConfig, MuonConfig, NorMuonConfig
from ..groups.rates import config_rates
from ..groups.separate import orthogonal, policy_of, role_groups, stored_rule
from ..optim.owners import assign, cuts, operations

RULES = {MuonConfig: "muon", NorMuonConfig: "normuon", Dion2Config: "dion2", DionConfig: "dion"}
COLUMNS = ("parameter_bytes", "state_bytes", "operations", "optimizer_sent", "model_sent")


@dataclass(frozen=True)
class Plan:
    """``table``: one row for each rank of one copy of the model and each role.

    - parameter_bytes, state_bytes: held between steps.
    - operations: floating-point operations of the matrix rule in one step.
    - optimizer_sent: bytes that leave the rank in the optimizer's step.
    - model_sent: bytes that leave it for weights and gradients by FSDP2 or DDP, if their collectives are rings
      (gathering N equal parts sends N - 1 of them, averaging sends twice as many).
    """

    table: pd.DataFrame
    mesh: MeshConfig
    elements: int  # of the model
    control_sent: int  # bytes in which ranks agree, at each step, on who has gradients

    def ranks(self) -> pd.DataFrame:
        """Return one row for each rank, over all roles."""
        total = self.table.groupby("rank")[list(COLUMNS)].sum()
        total["optimizer_sent"] += self.control_sent
        return total

    @property
    def imbalance(self) -> float:
        """The most operations on any rank over the mean of all ranks: 1 is perfect balance."""
        done = self.ranks()["operations"]
        return float(done.max() / done.mean()) if done.mean() else 1.0

    def seconds(self, *, tokens: int, flops: float, bandwidth: float, active: float | None = None) -> dict[str, float]:
        """Return the seconds that each part of one step takes on the slowest rank, and the share of ``communication``.

        Args:
            tokens: in a step, over all ranks; each token costs 6 operations for each element (arXiv 2001.08361).
            flops: operations that a rank really does in a second.
            bandwidth: bytes that really leave a rank in a second. The sum assumes no overlap, which is pessimistic.
            active: elements of the model that a token uses; None: all.
        """
        worst = self.ranks().max()
        parts = {
            "model": 6.0 * (active or self.elements) * tokens / self.mesh.size / flops,
            "orthogonalization": float(worst["operations"]) / flops,
            "model_sent": float(worst["model_sent"]) / bandwidth,
            "optimizer_sent": float(worst["optimizer_sent"]) / bandwidth,
        }
        sent = parts["model_sent"] + parts["optimizer_sent"]
        return parts | {"communication": sent / sum(parts.values())}


def plan(model: nn.Module, config: Any, mesh: MeshConfig, *, itemsize: int = 4) -> Plan:
    """Return what each rank holds, computes and sends for ``config``'s optimizer over ``model``.

    Args:
        model: not wrapped; on the meta device it costs nothing.
        config: of a native optimizer, or ``AdamWConfig``.
        mesh: the ranks. With both replicas and shards, the rows are the ranks of one replica; the others are the same.
        itemsize: bytes of an element of parameters, gradients and state.

    Raises:
        ValueError: the config has no native optimizer; or as ``groups.role_groups``.
    """
    if type(config) not in (*RULES, AdamWConfig):
        raise ValueError(f"a {type(config).__name__} was given; allowed are {', '.join(k.__name__ for k in RULES)}")
    rule = RULES.get(type(config), "")  # "" for AdamW, which orthogonalizes nothing
    groups = role_groups(model, config_rates(config), policy_of(config), stored=stored_rule(config, native=True))
    groups = [{**_options(config), **group} for group in groups]
    shared = mesh.dp_shard if mesh.dp_shard > 1 else mesh.dp_replicate
    parameters = [p for group in groups for p in group["params"]]
    members = [(group, tuple(p.shape)) for group in groups for p in group["params"]]
    owned = [i for i, (group, _) in enumerate(members) if rule and orthogonal(group)]
    costs = [operations(members[i][1], members[i][0], rule=rule) for i in owned]
    owner = dict(zip(owned, assign(costs, shared), strict=True))
    kinds: dict[Any, list[int]] = {}
    blocks = _block_parameters(model)
    for i, (group, shape) in enumerate(members):
        kinds.setdefault((group["role"], id(group), shape, parameters[i] in blocks), []).append(i)
    found: dict[str, np.ndarray] = {}
    for (role, _, shape, block), numbers in kinds.items():
        group = members[numbers[0]][0]
        owns = np.zeros(shared)
        for rank, count in Counter(owner[i] for i in numbers if i in owner).items():
            owns[rank] = count
        kind = rule if numbers[0] in owner else group.get("algorithm", "adamw")
        row = _kind(shape, group, kind, len(numbers), owns, mesh, itemsize)
        row[-1] = len(numbers) * itemsize * _model_sent(shape, mesh, twice=block)
        found[role] = found.get(role, 0) + row
    rows = [
        {"rank": rank, "role": role} | dict(zip(COLUMNS, (int(v) for v in values[:, rank]), strict=True))
        for role, values in found.items()
        for rank in range(shared)
    ]
    control = (1 + len(members)) * (shared - 1) if rule else 0
    return Plan(pd.DataFrame(rows), mesh, sum(math.prod(shape) for _, shape in members), control)


def _options(config: Any) -> dict[str, Any]:
    names = ("rank_fraction", "rank_multiple_of", "power_iters", "fraction", "flatten", "selection_scope")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _kind(
    shape: tuple[int, ...], group: Any, kind: str, count: int, owns: np.ndarray, mesh: MeshConfig, size: int
) -> np.ndarray:
    """Return ``(columns, ranks)`` for ``count`` parameters of one shape, of which each rank owns ``owns``."""
    ranks, cut = len(owns), mesh.dp_shard > 1

    def held(numbers: tuple[int, ...]) -> np.ndarray:
        """Return the elements of a tensor on each rank."""
        if not cut:
            return np.full(ranks, math.prod(numbers), dtype=float)
        return np.array(cuts(numbers[0], ranks), dtype=float) * math.prod(numbers[1:])

    parts = held(shape)
    extras = {key: held(s) for key, s in _extra_state(shape, group, kind).items()}
    sent = np.zeros(ranks)
    state = parts * (2 if kind == "adamw" else 1) + sum(extras.values(), np.zeros(ranks))
    if kind == "normuon" and group.get("transposed"):  # one variance for each stored column, whole on every rank
        columns = math.prod(shape) / shape[-2]
        state = state + columns
        sent += owns * (ranks - 1) * columns
    state = state * size + (4 if kind == "adamw" else 0)
    if owns.any():
        moved, back = _moved(shape, group, kind, parts, cut), [*extras.values()]
        if kind == "dion" or (kind == "dion2" and not _local(shape, group, cut)):
            back.append(parts)  # the momentum, which the owner has changed
        pulled = [moved, *extras.values()] if cut else []
        for part in pulled:
            sent += (count - owns) * part
        for part in [moved, *back]:
            sent += owns * (part.sum() - part if cut else (ranks - 1) * part)
    done = owns * operations(shape, group, rule=kind) if owns.any() else np.zeros(ranks)
    return np.stack([parts * size * count, state * count, done, sent * size, np.zeros(ranks)])


def _extra_state(shape: tuple[int, ...], group: Any, kind: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a matrix's state besides its momentum, all cut along their first dim."""
    flat = (shape[0], math.prod(shape[1:])) if group.get("flatten") and len(shape) > 2 else shape
    if kind == "normuon" and not group.get("transposed"):
        return {"variance_neuron": (*flat[:-1], 1)}
    if kind == "dion":
        short, multiple = min(flat[-2:]), group.get("rank_multiple_of", 1)
        rank = min(multiple * math.ceil(group.get("rank_fraction", 1.0) * short / multiple), *flat[-2:])
        return {"Q": (*flat[:-2], short, rank)}
    return {}


def _local(shape: tuple[int, ...], group: Any, cut: bool) -> bool:
    return cut and len(shape) == 2 and group.get("selection_scope") == "local" and not group.get("transposed")


def _moved(shape: tuple[int, ...], group: Any, kind: str, parts: np.ndarray, cut: bool) -> np.ndarray:
    """Return the elements that each rank sends of its part: all of them, or the rows that Dion2 chose."""
    if kind != "dion2" or not _local(shape, group, cut):
        return parts
    rows = parts / shape[1]
    return np.minimum(rows, max(1, math.ceil(group["fraction"] * rows[0]))) * shape[1]


def _model_sent(shape: tuple[int, ...], mesh: MeshConfig, *, twice: bool) -> float:
    """Return the elements that leave a rank for one parameter's weights and gradients, by ring collectives.

    FSDP2 gathers weights for the forward pass. For the backward pass it gathers again those that it has freed (all but
    the root's). Then it scatters the sum of gradients. Parts are padded to equal size. Replicas average what is left.
    """
    whole, copies, shards = math.prod(shape), mesh.dp_replicate, mesh.dp_shard
    part = -(-shape[0] // shards) * math.prod(shape[1:]) if shape else whole
    sharding = (shards - 1) * part * (3.0 if twice else 2.0) if shards > 1 else 0.0
    return sharding + 2.0 * (copies - 1) / copies * part


def _block_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of repeated blocks, which FSDP2 frees between forward and backward pass."""
    return {p for m in model.modules() if isinstance(m, nn.ModuleList) for p in m.parameters()}
