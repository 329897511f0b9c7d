"""The one loop: ``train(run) -> RunRecord``, and what it measures.

The same run gives the same curve, bit for bit, on one CPU machine at the same number of threads; torch's global
generators and its thread count are left as they were.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import data
from ..config import Factory, RunConfig
from ..groups.builder import build_optimizer
from ..groups.table import group_table
from ..model import GPT, next_token_loss
from ..optim import NonFiniteGradient
from ..records.files import home
from ..records.record import RunRecord
from . import checkpoint
from .environment import environment, identity, peak_bytes
from .world import TIMEOUT, World, clip_, open_mesh, part

EXPLODED = 4.0  # a training loss above this many times its first value ends the run as diverged

OnStep = Callable[[dict[str, float]], None]


def train(
    run: RunConfig, on_step: OnStep | None = None, *, checkpoints: Path | None = None, wait: float = TIMEOUT
) -> RunRecord:
    """Return the record of one run; a loss that is not finite or explodes ends it as ``diverged``, with its curve.

    Args:
        run: what to train.
        on_step: called after each step with step (from 1), tokens, train_loss (nats/token, before the step) and factor,
            and with val_loss and val_bpb where evaluated. It observes only.
        checkpoints: folder of the run's checkpoints where ``run.checkpoint_every`` is set; None: one under ``home()``,
            the same at any number of ranks. The newest complete one is gone on from.
        wait: with ``run.mesh``, seconds that a rank waits for the others before it says who is missing.

    Every rank of a mesh (torchrun's, see ``launch``) calls this with the same run and gets the same curve.

    Raises:
        ValueError: the run cannot be trained as configured; nothing was started.
        optim.ranks.RankMissing: another rank is gone or hangs.
    """
    run = run.resolved()
    check_device(run)
    with _private_torch(run):
        if run.mesh is None:
            return _Trainer(run, checkpoints=checkpoints).train(on_step)
        with open_mesh(run.mesh, device=run.device, timeout=wait) as mesh:
            world = World(mesh)
            with world.names_the_missing():
                return _Trainer(run, world, checkpoints=checkpoints).train(on_step)


def check_device(run: RunConfig) -> None:
    """Raise a ValueError where a resolved run asks for CUDA on a machine without it."""
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' was given on a machine without CUDA; allowed is 'cpu' or 'auto'")


def try_train(run: RunConfig, on_step: OnStep | None = None, *, how: Callable[..., RunRecord] = train) -> RunRecord:
    """Return what ``how(run, on_step=on_step)`` returns, or where it raises a ``failed`` record with the traceback."""
    run = run.resolved()
    try:
        return how(run, on_step=on_step)
    except Exception:
        return RunRecord(config=run, hash=run.hash, status="failed", error=traceback.format_exc())


@contextlib.contextmanager
def _private_torch(run: RunConfig) -> Iterator[None]:
    """Give the run its own threads and a generator of its own, and put both back."""
    threads = torch.get_num_threads()
    devices = [torch.cuda.current_device()] if run.device == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(run.seed)  # for models of one's own, dropout included; ours draw from private generators
        torch.set_num_threads(run.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class _Trainer:
    """The state of one run: tokens, model, optimizer, and the columns that become its record."""

    def __init__(self, run: RunConfig, world: World | None = None, *, checkpoints: Path | None = None) -> None:
        self.run, self.world = run, world or World()
        self.rows = self.world.rows(run.batch_size)
        self.tokens = data.load(run.data)
        self.model = build_model(run)
        self.context = context_of(run)
        self.tokens_a_step = run.batch_size * self.context
        data.check(self.tokens, vocab_size=_vocab_size(self.model), context=self.context)
        self.model.to(run.device)
        self.validation = data.validation_batches(self.tokens, run.batch_size, self.context, run.eval_tokens)
        self.model = self.world.wrap(self.model)
        self.optimizer = build_optimizer(run.optimizer, self.model, self.world.optimizer_mesh(self.model))
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        self.parts = dict.fromkeys(("data", "forward_backward", "optimizer", "evaluation"), 0.0)  # seconds
        self.record = RunRecord(
            config=run,
            hash=run.hash,
            status="finished",
            curve={"step": [], "tokens": [], "train_loss": [], "factor": []},
            evaluations={"step": [], "val_loss": [], "val_bpb": []},
            rms={"step": [], "role": [], "weight": [], "gradient": [], "update": []},
            groups=group_table(self.optimizer).to_dict("records"),
            environment=environment(run) | ({"ranks": self.world.size} if run.mesh else {}),
        )
        self.start, self.folder = 0, checkpoints
        if run.checkpoint_every is not None:
            self._resume()

    def _resume(self) -> None:
        """Go on from the newest complete checkpoint, if there is one."""
        self.key = {"run": replace(self.run, mesh=None).hash} | identity(self.run)
        self.folder = self.world.of_first(checkpoint_folder(self.run) if self.folder is None else Path(self.folder))
        meta = checkpoint.load(self.folder, self.key, model=self.model, optimizer=self.optimizer)
        if meta is not None:
            self.start = meta["step"]
            self.record.curve, self.record.evaluations, self.record.rms = (
                meta[name] for name in ("curve", "evaluations", "rms")
            )

    def _save(self, step: int) -> None:
        columns = {name: getattr(self.record, name) for name in ("curve", "evaluations", "rms")}
        checkpoint.save(
            self.folder, {"key": self.key, "step": step} | columns, model=self.model, optimizer=self.optimizer
        )

    def train(self, on_step: OnStep | None) -> RunRecord:
        """Run the steps and return the record."""
        start = time.perf_counter()
        for step in range(self.start, self.run.steps):
            if not self._step(step):
                break
            if on_step is not None:
                on_step(self._last(step + 1))
            if self.run.checkpoint_every is not None and (step + 1) % self.run.checkpoint_every == 0:
                self._save(step + 1)
        seconds = time.perf_counter() - start
        steps = max(1, len(self.record.curve["step"]) - self.start)
        trained = seconds - self.parts["evaluation"]
        self.record.timing = {f"{part}_ms": 1e3 * value / steps for part, value in self.parts.items()} | {
            "tokens_per_second": (len(self.record.curve["step"]) - self.start) * self.tokens_a_step / trained,
            "seconds": seconds,
            "peak_bytes": peak_bytes(self.run.device),
        }
        return self.record

    def _step(self, step: int) -> bool:
        """Do one step and note it; return False where the loss says that the run is over."""
        run, curve = self.run, self.record.curve
        factor = run.schedule.factor(step, run.steps)
        with self._timed("data"):
            x_BT, y_BT = data.batch(self.tokens, run.data_seed, step, run.batch_size, self.context)
            x_BT, y_BT = x_BT[self.rows].to(run.device), y_BT[self.rows].to(run.device)
        with self._timed("forward_backward"):
            loss = self._loss(x_BT, y_BT)
            loss.backward()
            train_loss = self.world.mean(loss)
        _append(curve, step + 1, (step + 1) * self.tokens_a_step, train_loss, factor)
        if not train_loss <= EXPLODED * curve["train_loss"][0]:  # also catches NaN
            return self._diverged(f"training loss {train_loss:.4g} nats/token at step {step + 1}")
        evaluated = (step + 1) % run.eval_every == 0 or step + 1 == run.steps
        before = self._weights() if evaluated else None
        try:
            with self._timed("optimizer"):
                self._update(factor)
        except NonFiniteGradient as error:  # the loss can be finite where its gradient is not
            return self._diverged(f"{error} at step {step + 1}")
        if before is not None:
            self._note_rms(step + 1, before)
            with self._timed("evaluation"):
                val_loss = self._evaluate(step + 1)
            if not math.isfinite(val_loss):
                return self._diverged(f"validation loss {val_loss:.4g} nats/token after step {step + 1}")
        self.optimizer.zero_grad(set_to_none=True)
        return True

    def _diverged(self, reason: str) -> bool:
        self.record.status, self.record.error = "diverged", reason
        return False

    def _loss(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        with torch.autocast(self.run.device, torch.bfloat16, enabled=self.run.dtype == "bfloat16"):
            return next_token_loss(self.model, x_BT, y_BT)

    def _update(self, factor: float) -> None:
        """Step the optimizer with every group's own rate times one factor: the ratios between groups never change."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # upstream keeps its rates in tensors
                group["lr"].fill_(group["initial_lr"] * factor)
            else:
                group["lr"] = group["initial_lr"] * factor
        if self.run.grad_clip is not None:
            clip_(self.model.parameters(), self.run.grad_clip)
        self.optimizer.step()
        if self.run.device == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def _evaluate(self, step: int) -> float:
        self.model.eval()
        rows, device = self.rows, self.run.device
        losses = [self.world.mean(self._loss(x[rows].to(device), y[rows].to(device))) for x, y in self.validation]
        self.model.train()
        self.world.settle(self.model)
        loss = math.fsum(losses) / len(losses)
        bpb = loss / math.log(2) / self.tokens.bytes_per_token
        _append(self.record.evaluations, step, loss, bpb)
        return loss

    def _weights(self) -> list[list[Tensor]]:
        return [[part(p).clone() for p in group["params"]] for group in self.optimizer.param_groups]

    @torch.no_grad()
    def _note_rms(self, step: int, before: list[list[Tensor]]) -> None:
        """Note the root mean square of weight, gradient and last update, by role."""
        sums: dict[str, list[float]] = {}
        for group, olds in zip(self.optimizer.param_groups, before, strict=True):
            row = sums.setdefault(group.get("role", "all"), [0.0] * 4)
            for p, old in zip(group["params"], olds, strict=True):
                new, grad = part(p), torch.zeros(()) if p.grad is None else part(p.grad)
                squares = (float(t.float().square().sum()) for t in (new, grad, new - old))
                row[:] = [new.numel() + row[0], *(a + b for a, b in zip(row[1:], squares, strict=True))]
        for role, row in sums.items():
            count, *squares = self.world.sum_shards(row, self.run.device)
            _append(self.record.rms, step, role, *(math.sqrt(s / count) for s in squares))

    def _last(self, step: int) -> dict[str, float]:
        row = {column: values[-1] for column, values in self.record.curve.items()}
        if self.record.evaluations["step"][-1:] == [step]:
            row |= {column: values[-1] for column, values in self.record.evaluations.items()}
        return row

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[part] += time.perf_counter() - start


def checkpoint_folder(run: RunConfig) -> Path:
    """Return the folder of a run's checkpoints, the same whatever its mesh: another number of ranks finds it too."""
    return home() / "checkpoints" / replace(run, mesh=None).hash


def _append(columns: dict[str, list[Any]], *row: Any) -> None:
    for column, value in zip(columns.values(), row, strict=True):
        column.append(value)


def build_model(run: RunConfig) -> nn.Module:
    """Return the model of a run on the CPU, with the initial weights of its seed."""
    if not isinstance(run.model, Factory):
        return GPT(run.model, seed=run.seed)
    with torch.random.fork_rng([]):
        torch.manual_seed(run.seed)
        return run.model.load()(**run.model.kwargs)


def context_of(run: RunConfig) -> int:
    """Return the tokens a window of a run.

    Raises:
        ValueError: a model of one's own without ``RunConfig.context``, or a window longer than learned positions.
    """
    own = None if isinstance(run.model, Factory) else run.model.context
    context = run.context or own
    if context is None:
        raise ValueError(f"context=None was given with the model {run.model.name!r}; allowed is a number of tokens")
    if own is not None and context > own and run.model.positions == "learned":
        raise ValueError(f"context={context} was given; allowed is up to the {own} learned positions")
    return context


def _vocab_size(model: nn.Module) -> int:
    """Return how many ids a model knows: the rows of its input embedding, else of its first embedding.

    Raises:
        ValueError: a model of one's own without an embedding.
    """
    find = getattr(model, "get_input_embeddings", None)
    tables = [find()] if find is not None else [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if not tables:
        raise ValueError(f"{type(model).__name__} was given, which has no nn.Embedding; allowed is a model of ids")
    return tables[0].num_embeddings
