"""The one loop: ``train(run) -> RunRecord``.

The same run gives the same curve, bit for bit, on one CPU machine with the same number of threads. Torch's global
generators and its number of threads are afterwards as they were before.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from .. import data
from ..config import RunConfig
from ..groups import build_optimizer, group_table
from ..model import next_token_loss
from ..optim import NonFiniteGradient
from ..records import RunRecord
from .assembly import build_model, context_of, vocab_size
from .environment import environment
from .measure import Clock, Columns, rms_by_role, validation_loss, weights_of
from .resume import Resume
from .world import TIMEOUT, World, clip_, open_mesh

EXPLODED = 4.0  # a training loss above this many times its first value ends the run as diverged

OnStep = Callable[[dict[str, float]], None]


def train(
    run: RunConfig, on_step: OnStep | None = None, *, checkpoints: Path | None = None, wait: float = TIMEOUT
) -> RunRecord:
    """Return the record of one run. A loss that explodes or is not finite ends it as ``diverged``, with its curve.

    Args:
        run: what to train.
        on_step: called after each step with a dict: step (from 1), tokens, train_loss (nats/token, before the step)
            and factor, and after an evaluation also val_loss and val_bpb. It only observes.
        checkpoints: folder of the run's checkpoints if ``run.checkpoint_every`` is set; None: a folder under
            ``home()``, the same for any number of ranks. Training goes on from the newest complete checkpoint.
        wait: with ``run.mesh``, seconds that a rank waits for the others before it says who is missing.

    Every rank of a mesh (started by ``launch`` or torchrun) calls this with the same run and gets the same curve.

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
    """Raise a ValueError if a resolved run asks for CUDA on a machine without it."""
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' was given on a machine without CUDA; allowed is 'cpu' or 'auto'")


def try_train(run: RunConfig, on_step: OnStep | None = None, *, how: Callable[..., RunRecord] = train) -> RunRecord:
    """Return what ``how(run, on_step=on_step)`` returns, or a ``failed`` record with the traceback if it raises."""
    run = run.resolved()
    try:
        return how(run, on_step=on_step)
    except Exception:
        return RunRecord(config=run, hash=run.hash, status="failed", error=traceback.format_exc())


@contextlib.contextmanager
def _private_torch(run: RunConfig) -> Iterator[None]:
    """Give the run its own number of threads and its own generator state, and restore both afterwards."""
    threads = torch.get_num_threads()
    devices = [torch.cuda.current_device()] if run.device == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(run.seed)  # for your own models, and for dropout; our GPT draws from a private generator
        torch.set_num_threads(run.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class _Trainer:
    """One run: its tokens, model and optimizer, and the steps that it takes."""

    def __init__(self, run: RunConfig, world: World | None = None, *, checkpoints: Path | None = None) -> None:
        self.run, self.world = run, world or World()
        self.rows = self.world.rows(run.batch_size)
        self.tokens = data.load(run.data)
        self.model = build_model(run)
        self.context = context_of(run)
        self.tokens_a_step = run.batch_size * self.context
        data.check(self.tokens, vocab_size=vocab_size(self.model), context=self.context)
        self.model.to(run.device)
        self.validation = data.validation_batches(self.tokens, run.batch_size, self.context, run.eval_tokens)
        self.model = self.world.wrap(self.model)
        self.optimizer = build_optimizer(run.optimizer, self.model, self.world.optimizer_mesh(self.model))
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        self.record = RunRecord(
            config=run,
            hash=run.hash,
            status="finished",
            groups=[{str(k): v for k, v in row.items()} for row in group_table(self.optimizer).to_dict("records")],
            environment=environment(run) | ({"ranks": self.world.size} if run.mesh else {}),
        )
        self.columns = Columns(self.record)
        self.resume = None if run.checkpoint_every is None else Resume(run, checkpoints, self.world)
        self.start = self.resume.load(self.record, self.model, self.optimizer) if self.resume else 0
        self.clock = Clock()

    def train(self, on_step: OnStep | None) -> RunRecord:
        """Take the steps and return the record."""
        every = self.run.checkpoint_every
        for step in range(self.start, self.run.steps):
            if not self._step(step):
                break
            if on_step is not None:
                on_step(self.columns.last(step + 1))
            if self.resume and every and (step + 1) % every == 0:
                self.resume.save(step + 1, self.record, self.model, self.optimizer)
        steps = len(self.record.curve["step"]) - self.start
        self.record.timing = self.clock.timing(steps, self.tokens_a_step, self.run.device)
        return self.record

    def _step(self, step: int) -> bool:
        """Take one step and note its numbers; return False if the run is over because it diverged."""
        run = self.run
        factor = run.schedule.factor(step, run.steps)
        with self.clock.time("data"):
            x_BT, y_BT = data.batch(self.tokens, run.data_seed, step, run.batch_size, self.context)
            x_BT, y_BT = x_BT[self.rows].to(run.device), y_BT[self.rows].to(run.device)
        with self.clock.time("forward_backward"):
            loss = self._loss(x_BT, y_BT)
            loss.backward()
            train_loss = self.world.mean(loss)
        self.columns.append("curve", step + 1, (step + 1) * self.tokens_a_step, train_loss, factor)
        if not train_loss <= EXPLODED * self.record.curve["train_loss"][0]:  # also catches NaN
            return self._diverged(f"training loss {train_loss:.4g} nats/token at step {step + 1}")
        evaluates = (step + 1) % run.eval_every == 0 or step + 1 == run.steps
        before = weights_of(self.optimizer) if evaluates else None
        try:
            with self.clock.time("optimizer"):
                self._update(factor)
        except NonFiniteGradient as error:  # the loss can be finite although its gradient is not
            return self._diverged(f"{error} at step {step + 1}")
        if before is not None and not math.isfinite(val_loss := self._evaluate(step + 1, before)):
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
        """Step the optimizer with every group's own rate times one factor, so that ratios between groups stay."""
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

    def _evaluate(self, step: int, before: list[list[Tensor]]) -> float:
        """Note what is measured after ``step``, given the weights before it, and return the validation loss."""
        device = self.run.device
        for role, values in rms_by_role(self.optimizer, before, self.world, device).items():
            self.columns.append("rms", step, role, *values)
        with self.clock.time("evaluation"):
            loss = validation_loss(self.model, self._loss, self.validation, self.world, self.rows, device)
        self.columns.append("evaluations", step, loss, loss / math.log(2) / self.tokens.bytes_per_token)
        return loss
