"""Where and with what a run is made: what its record says besides its numbers, and whether they still hold."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import torch

from .. import data
from ..config import AdamWConfig, Factory, RunConfig
from ..records.files import ROOT

NUMERICS_VERSION = 2  # raise it when a change alters any curve; stored runs of another number are trained again


def identity(run: RunConfig) -> dict[str, Any]:
    """Return what decides, besides the config, whether a new run would give what a stored record says."""
    return {
        "corpus_hash": data.load(run.data).corpus_hash,
        "backend": backend_name(run.optimizer),
        "numerics_version": NUMERICS_VERSION,
    }


def backend_name(optimizer: Any) -> str:
    """Return what computes the updates of a resolved optimizer config: native, dion@<commit>, torch, or a factory."""
    if isinstance(optimizer, Factory):
        return optimizer.name
    if isinstance(optimizer, AdamWConfig):
        return "torch"
    if optimizer.backend == "native":
        return "native"
    from ..groups import upstream

    return f"dion@{upstream.commit()}"


def environment(run: RunConfig) -> dict[str, Any]:
    """Return where and with what a run is made: hashes, seeds, versions, device, backend, threads, git commit."""
    return identity(run) | {
        "tokenizer_hash": data.load(run.data).tokenizer_hash,
        "seed": run.seed,
        "data_seed": run.data_seed,
        "versions": _versions(),
        "device": torch.cuda.get_device_name() if run.device == "cuda" else platform.machine(),
        "threads": run.threads,
        "commit": git_commit(),
    }


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("numpy", "sentencepiece", "dion-sandbox")}
    return {"python": platform.python_version(), "torch": torch.__version__} | packages


def stamp() -> str:
    """Return one line that says what made a notebook's numbers: versions, device, git commit."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = ", ".join(f"{name} {number}" for name, number in _versions().items())
    return f"{versions}; {device}; commit {git_commit()}"


@functools.cache
def git_commit() -> str | None:
    """Return the checkout's commit, with ``+`` where files have changed since; None outside a git checkout."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def peak_bytes(device: str) -> int:
    """Return the peak memory in bytes: of the GPU on CUDA, of this process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows has none
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
