"""Cases of ``test_sharded``: each compares optimizers on several ranks with what one process does."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sandbox.config import MeshConfig
from sandbox.groups.mesh import get_dion_mesh
from sandbox.optim import Dion, Dion2, Muon, NorMuon
from sandbox.training.world import open_mesh

SHAPES = {  # awkward over 4 ranks: dims 1, 3, 5, 18; an expert batch; vectors and tables of the same kinds
    **{"a": (1, 7), "b": (3, 8), "c": (5, 5), "d": (18, 6), "e": (6, 18), "f": (8, 16), "g": (8, 16), "h": (2, 6, 4)},
    **{"gain": (5,), "one": (1,), "table": (18, 3), "head": (7, 4)},
}
SCALARS = ("gain", "one", "table", "head")
KINDS = {"fsdp": (1, None), "ddp": (None, 1), "hsdp": (2, 2)}  # dp_replicate, dp_shard; None: all ranks
OPTIMIZERS = {
    "muon": (Muon, {"nesterov": True}),
    "normuon": (NorMuon, {"cautious_wd": True}),
    "dion2": (Dion2, {"selection_scope": "global", "fraction": 0.4}),
    "dion": (Dion, {"rank_fraction": 0.5}),
}


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Bag(nn.Module):
    """Parameters of all shapes."""

    def __init__(self):
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(randn(*shape, seed=i)))


def groups(model, options=None):
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if n not in SCALARS], "role": "matrix", **(options or {})},
        {"params": [named["gain"], named["table"]], "algorithm": "adamw", "lr": 0.01},
        {"params": [named["one"], named["head"]], "algorithm": "lion", "lr": 0.01},
    ]


def gradient(p, whole):
    """Return a gradient placed as its parameter is."""
    if not isinstance(p, DTensor):
        return whole.clone()
    return torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def run(model, optimizer, steps=range(4), skip=()):
    for step in steps:
        for i, (name, p) in enumerate(model.named_parameters()):
            p.grad = None if (name, step) in skip else gradient(p, randn(*p.shape, seed=1000 * (step + 1) + i))
        optimizer.step()


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(model):
    return {name: full(p) for name, p in model.named_parameters()}


def make(name, mesh, model, **more):
    cls, options = OPTIMIZERS[name]
    keyword = "outer_shard_mesh" if cls is Dion else "distributed_mesh"
    return cls(groups(model), lr=0.05, weight_decay=0.1, **{keyword: mesh}, **options, **more)


def spread(kind, size, model):
    """Return the mesh of a kind over all ranks, and the optimizer's mesh; the model is sharded in place."""
    mesh = dist.init_device_mesh(
        "cpu", tuple(n or size for n in KINDS[kind]), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    if kind == "ddp":
        return mesh, mesh["dp_replicate"].get_group()
    fully_shard(model, mesh=mesh if kind == "hsdp" else mesh["dp_shard"])
    return mesh, get_dion_mesh(mesh, model)


def kinds_of(size):
    return [kind for kind in KINDS if kind != "hsdp" or size == 4]


def equivalence(size, folder):
    """Largest difference to one process, by kind and optimizer."""
    worst = {}
    for name in OPTIMIZERS:
        alone = Bag()
        run(alone, make(name, None, alone))
        for kind in kinds_of(size):
            model = Bag()
            _, mesh = spread(kind, size, model)
            optimizer = make(name, mesh, model)
            run(model, optimizer)
            here, there = weights(model), weights(alone)
            worst[kind, name] = max((here[n] - there[n]).abs().max().item() for n in there)
    return worst


def without_gradient(size, folder):
    """The same with parameters that rest for two steps on all ranks, and shards or replicas that lack a gradient."""
    worst = {}
    for name in OPTIMIZERS:
        alone = Bag()
        run(alone, make(name, None, alone), skip={("d", 0), ("d", 1), ("gain", 0), ("gain", 1)})
        for kind in kinds_of(size):
            model = Bag()
            _, mesh = spread(kind, size, model)
            optimizer = make(name, mesh, model)
            keys = [sorted(s) for s in optimizer.state.values()]
            run(model, optimizer, skip={("d", 0), ("d", 1), ("gain", 0), ("gain", 1)})
            here, there = weights(model), weights(alone)
            worst[kind, name] = max((here[n] - there[n]).abs().max().item() for n in there)
            assert keys == [sorted(s) for s in optimizer.state.values()]
    return worst


def one_rank_without_gradient(size, folder):
    """A replica that lacks a gradient takes the others'; a shard that lacks it counts as zero."""
    worst, rank = {}, dist.get_rank()
    for kind, name in (("ddp", "muon"), ("fsdp", "normuon")):
        alone, model = Bag(), Bag()
        whole = {n: randn(*p.shape, seed=7 + i) for i, (n, p) in enumerate(alone.named_parameters())}
        _, mesh = spread(kind, size, model)
        optimizer = make(name, mesh, model)
        for n, p in model.named_parameters():
            p.grad = None if rank == size - 1 and n in ("d", "f", "gain", "head") else gradient(p, whole[n])
        optimizer.step()
        for n, p in alone.named_parameters():
            p.grad = whole[n].clone()
            if kind == "fsdp" and n in ("d", "f", "gain", "head"):
                held = -(-p.shape[0] // size)
                p.grad[held * (size - 1) :] = 0
        make(name, None, alone).step()
        here, there = weights(model), weights(alone)
        worst[kind] = max((here[n] - there[n]).abs().max().item() for n in there)
    return worst


def nobody_has_a_gradient(size, folder):
    model = Bag()
    early = make("muon", dist.group.WORLD, model)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (size,)))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    try:
        early.step()
    except ValueError as error:
        return str(error)


def not_finite_on_one_rank(size, folder):
    model = Bag()
    _, mesh = spread("fsdp", size, model)
    optimizer = make("muon", mesh, model)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if dist.get_rank() == 0:
        model.d.grad.to_local()[0, 0] = float("nan")
    try:
        optimizer.step()
    except ValueError as error:
        after = weights(model)
        return type(error).__name__, all(torch.equal(after[n], before[n]) for n in before)


def local_choice(size, folder):
    """Dion2's scope "local": each rank's own rows, hence other weights, but all of them moved and finite."""
    model, exact = Bag(), Bag()
    _, mesh = spread("fsdp", size, model)
    options = {"lr": 0.05, "weight_decay": 0.0, "fraction": 0.4, "distributed_mesh": mesh}
    cheap = Dion2(groups(model), selection_scope="local", **options)
    run(model, cheap)
    _, mesh = spread("fsdp", size, exact)
    costly = Dion2(groups(exact), selection_scope="global", **options)
    run(exact, costly)
    moved = {n: not torch.equal(w, randn(*SHAPES[n], seed=i)) for i, (n, w) in enumerate(weights(model).items())}
    finite = all(w.isfinite().all() for w in weights(model).values())
    return {"moved": all(moved.values()), "finite": finite, "cheap": cheap._ranks.sent, "costly": costly._ranks.sent}


def local_choice_by_hand(size, folder):
    """One row-sharded matrix: the rows that move are the largest of each shard."""
    model = nn.Linear(6, 8 * size, bias=False)
    before = model.weight.detach().clone()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (size,)))
    mesh = get_dion_mesh(model.weight.device_mesh, model)
    optimizer = Dion2(model.parameters(), lr=1.0, weight_decay=0.0, fraction=0.25, distributed_mesh=mesh)
    whole = randn(8 * size, 6, seed=3)
    model.weight.grad = gradient(model.weight, whole)
    optimizer.step()
    moved = (full(model.weight) - _start(model, before, size)).abs().sum(1) > 0
    norms = whole.abs().sum(1).view(size, 8)
    expected = torch.zeros(size, 8, dtype=torch.bool).scatter_(1, norms.topk(2).indices, True)
    return torch.equal(moved.view(size, 8), expected)


def _start(model, before, size):
    """Return the weights that the shards started from: each rank's own, put together."""
    parts = [torch.empty_like(before) for _ in range(size)]
    dist.all_gather(parts, before)
    return torch.cat([parts[r].chunk(size)[r] for r in range(size)])


def state_shrinks(size, folder):
    """Bytes of state on this rank over those of one process, for matrices that divide."""
    shares = {}
    for name, (cls, options) in OPTIMIZERS.items():
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
        alone = _bytes(cls(model.parameters(), **options))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (size,)))
        mesh = get_dion_mesh(model[0].weight.device_mesh, model)
        keyword = "outer_shard_mesh" if cls is Dion else "distributed_mesh"
        shares[name] = _bytes(cls(model.parameters(), **options, **{keyword: mesh})) / alone
    return shares


def _bytes(optimizer):
    tensors = [t for s in optimizer.state.values() for t in s.values()]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def other_models(size, folder):
    """Ranks that hold other parameters are told so instead of waiting for ever."""
    model = nn.Linear(4, 4 + (dist.get_rank() == 1), bias=False)
    optimizer = Muon(model.parameters(), distributed_mesh=dist.group.WORLD)
    model.weight.grad = torch.ones_like(model.weight)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)


def resume(size, folder):
    """State saved by ``state_dict`` and loaded into a fresh optimizer goes on bit for bit."""
    same = {}
    for name in OPTIMIZERS:
        straight, first = Bag(), Bag()
        _, mesh = spread("fsdp", size, straight)
        run(straight, make(name, mesh, straight), steps=range(6))
        _, mesh = spread("fsdp", size, first)
        optimizer = make(name, mesh, first)
        run(first, optimizer, steps=range(3))
        second = Bag()
        with torch.no_grad():
            for p, w in zip(second.parameters(), weights(first).values(), strict=True):
                p.copy_(w)
        _, mesh = spread("fsdp", size, second)
        fresh = make(name, mesh, second)
        fresh.load_state_dict(optimizer.state_dict())
        run(second, fresh, steps=range(3, 6))
        here, there = weights(second), weights(straight)
        same[name] = all(torch.equal(here[n], there[n]) for n in there)
    return same


def wrong_size(size, folder):
    try:
        with open_mesh(MeshConfig(dp_shard=size + 1), device="cpu"):
            pass
    except ValueError as error:
        return str(error)


def somebody_is_missing(size, folder):
    """The last rank does not come: the others say so within the group's time-out. Runs last."""
    import datetime

    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = nn.Linear(4, 4, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = Muon(model.parameters(), distributed_mesh=group)
    if dist.get_rank() == size - 1:
        time.sleep(9)
        return None
    start = time.monotonic()
    try:
        optimizer.step()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - start


def everything(size, folder):
    """All the above within one mesh, opened and closed once."""
    answers = {}
    with open_mesh(MeshConfig(dp_shard=size), device="cpu", timeout=60) as mesh:
        answers["mesh"] = (mesh.mesh_dim_names, tuple(mesh.shape))
        for case in (
            *(equivalence, without_gradient, one_rank_without_gradient, nobody_has_a_gradient, not_finite_on_one_rank),
            *(local_choice, local_choice_by_hand, state_shrinks, other_models, resume, wrong_size, somebody_is_missing),
        ):
            answers[case.__name__] = case(size, folder)
    answers["closed"] = not dist.is_initialized()
    return answers


CASES = (everything,)
