"""The ranks of a run: open and close the process group and its mesh, wrap a model, reduce what is measured.

Axis names are those of NVIDIA NeMo Automodel and torchtitan. There is no global state: a ``World`` is passed on.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import itertools
import operator
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous

from ..config import MeshConfig
from ..optim.ranks import RankMissing, missing

AXES = ("dp_replicate", "dp_shard")
_BROKEN = re.compile(r"gloo|nccl|time[d]?\s?out|connection|socket|broken pipe", re.IGNORECASE)
_PROPAGATOR = "DTensor._op_dispatcher.sharding_propagator"
_CACHES = (  # functions that empty DTensor's caches; private, and not in every version of torch
    ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
    ("torch.distributed.tensor", f"{_PROPAGATOR}._propagate_tensor_meta_cached.cache_clear"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)
TIMEOUT = 300.0  # seconds that a rank waits for the others before it says who is missing


@contextlib.contextmanager
def open_mesh(config: MeshConfig, *, device: str = "auto", timeout: float = TIMEOUT) -> Iterator[Any]:
    """Open this launch's process group, yield its mesh with the axes dp_replicate and dp_shard, and close it again.

    The ranks come from torchrun's environment variables; without them this process is a world of one. A group that is
    already open is used and left open. CUDA tensors travel by nccl, CPU tensors and small messages by gloo.

    A process may open any number of meshes, one after another. Each is closed completely, DTensor's caches included,
    which would otherwise give the next mesh the groups of the last one.

    Args:
        config: the sizes of both axes.
        device: "cpu", "cuda" or "auto": cuda where there is one.
        timeout: seconds that any wait may take.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    opened = not dist.is_initialized()
    world = int(os.environ.get("WORLD_SIZE", "1")) if opened else dist.get_world_size()
    if config.size != world:
        raise ValueError(
            f"dp_replicate={config.dp_replicate} x dp_shard={config.dp_shard} = {config.size} ranks were given in a "
            f"world of {world}; allowed is {world}" + ("" if world > 1 else " (sandbox.launch starts several)")
        )
    mesh, whole, hook = None, True, sys.excepthook
    if opened:
        _open(kind, world, datetime.timedelta(seconds=timeout))
    try:
        mesh = dist.init_device_mesh(kind, (config.dp_replicate, config.dp_shard), mesh_dim_names=AXES)
        yield mesh
    except BaseException:
        whole = False
        raise
    finally:
        getattr(mesh, "_pg_registry", {}).clear()  # it holds the groups, and a cache may hold the mesh
        if opened:
            _close(wait=whole)
            sys.excepthook = hook  # torch sets one that names the rank, on top of the last, at every opening


def _open(kind: str, world: int, timeout: datetime.timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    options: dict[str, Any] = {"backend": backend, "timeout": timeout}
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store: dist.Store
    if world == 1 and "RANK" not in os.environ:
        store, rank = dist.HashStore(), 0
    else:  # its own store for each opening: in a shared one, keys of an earlier group would be taken for ours
        store, rank = dist.PrefixStore(f"sandbox-{next(_OPENED)}", _rendezvous()), int(os.environ["RANK"])
    dist.init_process_group(**options, store=store, rank=rank, world_size=world)


_OPENED = itertools.count()


@functools.cache
def _rendezvous() -> Any:
    """Return the store that torchrun's ranks share; a process connects to it once."""
    return next(iter(rendezvous("env://")))[0]


def _close(*, wait: bool) -> None:
    """Destroy the process group; after a success all ranks leave together, so no rank finds its peers gone."""
    if wait and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    dist.destroy_process_group()
    _forget()


def _forget() -> None:
    """Empty DTensor's caches, which keep a mesh after its groups are gone.

    DTensor replaces a mesh by an equal one from its cache, so a second mesh of the same shape would send through the
    groups of the first. Also, Gloo's threads end only with the last reference to their group. A thread that is still
    there when Python shuts down may wait for an interpreter that is gone, and the process aborts: SIGABRT, "terminate
    called without an active exception" (https://github.com/pytorch/pytorch/pull/179291).
    """
    for module, name in _CACHES:
        with contextlib.suppress(ImportError, AttributeError):
            operator.attrgetter(name)(importlib.import_module(module))()
    gc.collect()  # reducers and hooks of dropped models and cached meshes are held by reference cycles


def process_group_of(model: nn.Module) -> Any:
    """Return the process group of a model wrapped in DDP, for an optimizer's mesh argument; None without DDP."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return module.process_group
    return None


class World:
    """The ranks that train one run together; one process where there is no mesh."""

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh
        self.size = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else dist.get_rank()
        self.shards = 1 if mesh is None else mesh["dp_shard"].size()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model spread over the ranks: by DDP, by FSDP2 or HSDP (both in place), or unchanged."""
        if self.size == 1:
            return model
        if self.shards == 1:
            group = self.mesh["dp_replicate"].get_group()
            return nn.parallel.DistributedDataParallel(model, process_group=group)
        mesh = self.mesh if self.mesh["dp_replicate"].size() > 1 else self.mesh["dp_shard"]
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def settle(self, model: nn.Module) -> None:
        """Shard again what FSDP2 leaves whole after a forward pass without a backward pass: the root's parameters."""
        if self.shards > 1:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def optimizer_mesh(self, model: nn.Module) -> Any:
        """Return what the optimizer takes as its mesh: DDP's process group, else the mesh, else None."""
        if self.size == 1:
            return None
        return process_group_of(model) or self.mesh

    def rows(self, batch_size: int) -> slice:
        """Return which rows of a global batch this rank takes.

        Raises:
            ValueError: the batch does not divide by the number of ranks.
        """
        if batch_size % self.size:
            raise ValueError(f"batch_size={batch_size} was given for {self.size} ranks; allowed is a multiple of them")
        share = batch_size // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    @contextlib.contextmanager
    def names_the_missing(self) -> Iterator[None]:
        """Raise a RankMissing that names the rank where torch's collectives fail because a rank is gone or hangs."""
        try:
            yield
        except RankMissing:
            raise
        except RuntimeError as error:
            if self.size == 1 or not _BROKEN.search(str(error)):
                raise
            raise RankMissing(f"{missing(None, 'train')} the training ({str(error).splitlines()[0]})") from error

    def of_first(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank, such as the temporary folder that it made."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def mean(self, value: Tensor) -> float:
        """Return the mean of a number over all ranks, the same on each of them."""
        if self.size == 1:
            return value.item()
        total = value.detach().double().clone()
        dist.all_reduce(total)
        return total.item() / self.size

    def sum_shards(self, values: Sequence[float], device: str) -> list[float]:
        """Return the sums, over the shards of one copy, of numbers that each rank computed from its own part."""
        if self.shards == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self.mesh["dp_shard"].get_group())
        return total.tolist()


def part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, sharing memory, without gradient."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def clip_(parameters: Iterable[nn.Parameter], norm: float) -> None:
    """Scale the gradients so that their norm, over all parameters and all shards, is at most ``norm``."""
    parameters = [p for p in parameters if p.grad is not None]
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    total = total.full_tensor() if hasattr(total, "full_tensor") else total
    nn.utils.clip_grads_with_norm_(parameters, norm, total)
