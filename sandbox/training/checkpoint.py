"""Checkpoints of a run: torch's distributed files. They appear whole or not at all; any number of ranks can read them.

A checkpoint is a folder ``step-00000100``. It is written under another name and renamed when every rank is done, so a
write that was cut off leaves nothing that looks like a checkpoint. Tensors are stored by canonical parameter name
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html), the curve so far as JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from ..groups.roles.sites import find_places
from ..records.files import write_atomic

KEPT = 2  # complete checkpoints of a run; the older one is for when the newer cannot be read
META = "run.json"


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read, on this or another rank; earlier ones are intact."""


def save(folder: Path, meta: dict[str, Any], *, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Write the checkpoint of ``meta["step"]`` steps together with all ranks, and return its folder.

    Raises:
        CheckpointFailed: on every rank, where any rank could not write.
    """
    final = folder / f"step-{meta['step']:08d}"
    partial = folder / f".{final.name}.partial"
    tensors = _model_tensors(model) | _optimizer_tensors(model, optimizer) | _generators()
    steps = [group.get("step") for group in optimizer.param_groups]
    with _together(f"the checkpoint {final} was not written"):
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    try:
        with _together(f"the checkpoint {final} was not written"), _quiet():
            dcp.save(tensors, checkpoint_id=partial, no_dist=not dist.is_initialized())
        with _together(f"the checkpoint {final} was not written"):
            if _rank() == 0:
                write_atomic(partial / META, json.dumps(meta | {"group_steps": steps}))
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
    except CheckpointFailed:
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if _rank() == 0:
        for old in complete(folder)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{META}") if (path.parent / ".metadata").is_file())


def load(folder: Path, key: dict[str, Any], *, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Load the newest complete and readable checkpoint into model and optimizer; return its meta, or None without one.

    Args:
        folder: of the run.
        key: what ``meta["key"]`` must be; a checkpoint of another run is an error.
        model: on any number of ranks, wrapped or not.
        optimizer: over the same parameters.

    Raises:
        ValueError: the newest checkpoint is of another run, corpus or version of the numerics.
        CheckpointFailed: there are checkpoints, but none can be read.
    """
    found, failed = complete(folder), None
    for path in reversed(found):
        meta = json.loads((path / META).read_text())
        if meta["key"] != key:
            other = ", ".join(name for name in key if meta["key"].get(name) != key[name])
            raise ValueError(f"the checkpoint {path} is of another run ({other}); allowed is this run's, or no folder")
        try:
            with _together(f"the checkpoint {path} was not read"):
                _load(path, model, optimizer)
        except CheckpointFailed as error:
            logging.getLogger(__name__).warning("%s; trying an older one", error)
            failed = error
            continue
        for group, step in zip(optimizer.param_groups, meta["group_steps"], strict=True):
            if step is not None:
                group["step"] = step
        return meta
    if failed is not None:
        raise failed
    return None


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    _make_state(model, optimizer, stored)
    tensors = _model_tensors(model) | _optimizer_tensors(model, optimizer)
    generators = {name: state for name, state in _generators().items() if name in stored}
    with _quiet():
        dcp.load(tensors | generators, checkpoint_id=path, no_dist=not dist.is_initialized())
    if f"generator/{_rank()}" in generators:
        torch.set_rng_state(generators[f"generator/{_rank()}"])
    if f"generator/{_rank()}/cuda" in generators:
        torch.cuda.set_rng_state(generators[f"generator/{_rank()}/cuda"])


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {place.parameter: place.name for place in find_places(model).first}


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    buffers = {f"buffer/{name.removeprefix('module.')}": b for name, b in model.named_buffers()}
    return {f"model/{name}": p.detach() for p, name in _names(model).items()} | buffers


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = _names(model)
    return {
        f"optimizer/{names[p]}/{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer, stored: dict[str, Any]) -> None:
    """Create the stored state that the optimizer would create only in its first step, as torch's optimizers do."""
    for p, name in _names(model).items():
        prefix = f"optimizer/{name}/"
        for key, what in stored.items():
            if key.startswith(prefix) and key.removeprefix(prefix) not in optimizer.state[p]:
                like = what.size == p.shape
                fresh = torch.zeros_like(p) if like else torch.zeros(what.size, dtype=what.properties.dtype)
                optimizer.state[p][key.removeprefix(prefix)] = fresh.detach()


def _generators() -> dict[str, Tensor]:
    """Return the states of this rank's generators, from which dropout in a user's model draws."""
    states = {f"generator/{_rank()}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"generator/{_rank()}/cuda"] = torch.cuda.get_rng_state()
    return states


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def _together(sentence: str) -> Iterator[None]:
    """Raise CheckpointFailed on every rank if the body failed on any rank."""
    failed = None
    try:
        yield
    except CheckpointException as error:  # torch's own error is a BaseException and holds what each rank raised
        failed = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    every: list[str | None] = [failed]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, failed)
    for rank, why in enumerate(every):
        if why is not None:
            raise CheckpointFailed(f"{sentence}: rank {rank}: {why}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch's checkpoint code warns about itself, such as that this is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
