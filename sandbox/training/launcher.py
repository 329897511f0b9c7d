"""One run on several ranks, started from a notebook or a script: torchrun in a subprocess, watched to its end.

Each rank is a fresh interpreter, so it does not matter whether the notebook has used CUDA, and everything is imported
by name. Ranks end when their launcher is gone, so nothing is left behind, whichever process is killed.
https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..config import MeshConfig, RunConfig
from ..records.files import ROOT, record_path, write_atomic
from ..records.record import RunRecord
from .loop import OnStep, train
from .resume import checkpoint_folder
from .world import TIMEOUT

POLL = 0.1  # seconds between two looks at the ranks
GRACE = 5.0  # seconds after the first rank's error, for the others to report theirs
PATIENCE = 10.0  # seconds for torchrun to notice that its ranks are gone
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class LaunchFailed(RuntimeError):
    """A launch gave no record. The message says why, with the error of the rank that failed first."""


def launch(
    run: RunConfig,
    nproc: int | None = None,
    *,
    timeout: float | None = None,
    wait: float = TIMEOUT,
    on_step: OnStep | None = None,
    checkpoints: Path | None = None,
    devices: str | None = None,
    progress: bool = True,
) -> RunRecord:
    """Return the record of a run trained on ``nproc`` ranks of this machine.

    Args:
        run: what to train; without ``run.mesh`` it is sharded over all ranks (``MeshConfig(dp_shard=nproc)``).
        nproc: ranks, each a process with ``run.threads`` threads and, on CUDA, its own GPU; None: what the mesh needs,
            else 2.
        timeout: seconds after which everything is stopped; None: only ``wait`` is a limit.
        wait: seconds that a rank waits for the others before it says who is missing.
        on_step: as for ``train``; called in this process.
        checkpoints: as for ``train``.
        devices: the GPUs for the ranks, in the form of CUDA_VISIBLE_DEVICES; None: those of this process.
        progress: show one bar.

    Raises:
        ValueError: the mesh needs another number of ranks; nothing was started.
        LaunchFailed: a rank raised, died or hung, or the time was up. No process is left behind, also after Ctrl-C.
    """
    nproc = nproc or (run.mesh.size if run.mesh else 2)
    mesh = run.mesh or MeshConfig(dp_shard=nproc)
    if mesh.size != nproc:
        raise ValueError(f"nproc={nproc} was given for a mesh of {mesh.size} ranks; allowed is {mesh.size}")
    run = replace(run, mesh=mesh).resolved()
    if run.checkpoint_every is not None and checkpoints is None:
        checkpoints = checkpoint_folder(run)
    with tempfile.TemporaryDirectory(prefix="sandbox-launch-") as name:
        folder = Path(name)
        write_atomic(folder / "run.json", json.dumps(run.to_dict()))
        with open(folder / "log", "w+b") as log:
            agent = subprocess.Popen(
                _command(folder, nproc, wait, checkpoints), env=_environment(run, devices), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                _watch(agent, folder, run, timeout=timeout, on_step=on_step, progress=progress)
            finally:
                _stop(agent, folder)
        record = record_path(folder, run.hash)
        if not record.is_file():
            raise LaunchFailed(_reason(folder, agent.returncode, nproc))
        return RunRecord.load(record)


def _command(folder: Path, nproc: int, wait: float, checkpoints: Path | None) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    own = ["-m", "sandbox", "train", str(folder / "run.json"), "--out", str(folder), "--wait", str(wait)]
    own += ["--watched", str(os.getpid())] + (["--checkpoints", str(checkpoints)] if checkpoints else [])
    return [*torchrun, "--max-restarts=0", *own]


def _environment(run: RunConfig, devices: str | None) -> dict[str, str]:
    """Return this process's environment with the run's threads and this package, without those of an outer torchrun."""
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    kept = {k: v for k, v in os.environ.items() if k not in outer and not k.startswith("TORCHELASTIC_")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    return kept | dict.fromkeys(THREADS, str(run.threads)) | {"PYTHONPATH": os.pathsep.join(paths)}


def _watch(
    agent: subprocess.Popen[bytes], folder: Path, run: RunConfig, *, timeout: float | None, on_step: Any, progress: bool
) -> None:
    """Show the steps until torchrun has ended, then return."""
    start, seen, failed = time.monotonic(), 0, None
    with tqdm(total=run.steps, disable=not progress, desc=f"{run.ranks} ranks", unit="step") as bar:
        while True:
            ended = agent.poll() is not None
            rows = _lines(folder / "steps")
            for row in rows[seen:]:
                bar.update(row["step"] - bar.n)
                bar.set_postfix_str(f"{row['train_loss']:.3f} nats/token")
                if on_step is not None:
                    on_step(row)
            seen = len(rows)
            if ended or record_path(folder, run.hash).is_file():
                break
            if failed is None and any(folder.glob("rank*.error")):
                failed = time.monotonic()
            if failed is not None and time.monotonic() - failed > GRACE:
                return  # torchrun would wait half a minute for a rank that hangs
            if timeout is not None and time.monotonic() - start > timeout:
                raise LaunchFailed(f"the launch took longer than timeout={timeout:g} s, at step {seen} of {run.steps}")
            time.sleep(POLL)
    if not ended:  # the record is there; ranks still close their process group
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(PATIENCE)


def _lines(path: Path) -> list[dict[str, float]]:
    if not path.is_file():
        return []
    *whole, _ = path.read_text().split("\n")
    return [json.loads(line) for line in whole]


def _stop(agent: subprocess.Popen[bytes], folder: Path) -> None:
    """End what still runs: first the ranks, also those that hang, then torchrun, which removes its own files."""
    if agent.poll() is None:
        for path in folder.glob("rank*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            agent.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()


def _reason(folder: Path, code: int | None, nproc: int) -> str:
    """Return the errors of the ranks in the order in which they failed, or the end of the log if there are none."""
    errors = sorted(folder.glob("rank*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        told = {path.stem: path.read_text() for path in errors}
        first, text = next(iter(told.items()))
        others = "".join(f"\n{name}: {text.strip().splitlines()[-1]}" for name, text in list(told.items())[1:])
        return f"{first} of {nproc} failed:\n{text}{others}"
    log = (folder / "log").read_text(errors="replace")
    return f"torchrun ended with {code} and no rank left a record or an error:\n{log[-4000:]}"


def work(
    path: Path, out: Path, *, wait: float = TIMEOUT, checkpoints: Path | None = None, watched: int | None = None
) -> int:
    """Train one rank's part of the run in a JSON file, as ``python -m sandbox train`` does under torchrun.

    Rank 0 writes the record and, if a launcher watches (the process ``watched``), each step to ``out/steps``.
    Return the exit status; on an error the traceback is in ``out/rank<n>.error`` as well as on the terminal.
    """
    rank = int(os.environ.get("RANK", "0"))
    out.mkdir(parents=True, exist_ok=True)
    if watched is not None:
        write_atomic(out / f"rank{rank}.pid", str(os.getpid()))
        threading.Thread(target=_leave_with, args=(watched,), daemon=True).start()
    try:
        run = RunConfig.from_dict(json.loads(path.read_text()))
        with _step_file(out / "steps" if watched is not None and rank == 0 else None) as on_step:
            record = train(run, on_step, checkpoints=checkpoints, wait=wait)
        if rank == 0:
            record.save(out)
    except Exception:
        if watched is not None:
            write_atomic(out / f"rank{rank}.error", traceback.format_exc())
        traceback.print_exc()
        return 1
    return 0


@contextlib.contextmanager
def _step_file(path: Path | None) -> Iterator[OnStep | None]:
    if path is None:
        yield None
        return
    with open(path, "a", buffering=1) as file:

        def write(row: dict[str, float]) -> None:
            file.write(json.dumps(row) + "\n")

        yield write


def _leave_with(launcher: int) -> None:
    """End this process when its launcher, or the torchrun between them, is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            break
        except PermissionError:
            pass
        time.sleep(0.5)
    os._exit(1)
