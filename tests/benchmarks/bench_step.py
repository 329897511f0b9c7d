"""One optimizer step on the small GPT: native, its peers, a plain prototype and the floor, side by side as ratios.

``make bench`` prints a table for each width. All peers take turns within each round, in an order drawn anew, so that a
loaded machine slows them alike and each finds the caches as any other leaves them. A time is what a tenth of the rounds
stayed below: other work only adds, and the very least is luck with the caches. The floor is the arithmetic of five
quintic steps on every matrix over this machine's float32 matmul rate, measured in the same run. Without
``--benchmark-enable`` every peer runs once.
"""

import math
import os
import random
import statistics
import time
from dataclasses import dataclass

import pytest
import pytorch_optimizer
import torch

import sandbox as sb
from sandbox import optim
from sandbox.groups import upstream
from sandbox.optim.orthogonalize import COEFFICIENTS

LR, MU, DECAY, BETAS, EPSILON = 0.02, 0.95, 0.01, (0.9, 0.95), 1e-8
SIZES = {64: 2, 256: 6}  # width -> depth, at vocabulary 4096
ROUNDS = {64: 200, 256: 30}
SLOW = 1.0  # seconds a step; such a peer (bfloat16 on a CPU) runs in the first two rounds only
AGREE = 2e-4  # of weights after one step of native and prototype: float32, another order of sums


@dataclass
class Setting:
    """A model's parameters with fixed gradients: the matrices of its blocks, and the rest."""

    matrices: list
    rest: list

    @classmethod
    def of(cls, width):
        config = sb.ModelConfig(vocab_size=4096, width=width, depth=SIZES[width], heads=width // 32)
        model = sb.GPT(config, seed=0)
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.grad = 0.01 * torch.randn(p.shape, generator=generator)
        inner = [(p.ndim == 2 and "blocks" in name, p) for name, p in model.named_parameters()]
        return cls([p for matrix, p in inner if matrix], [p for matrix, p in inner if not matrix])

    def floor_operations(self):
        """Return the operations of five steps x <- (a + b A + c A^2) x, A = x x^T, on the shorter side of each."""
        sides = [sorted(p.shape) for p in self.matrices]
        return sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sides)


class Prototype:
    """What one would write first: momentum and five steps on stacks of equal shape, AdamW by its formula."""

    def __init__(self, setting):
        self.matrices, self.rest, self.t = setting.matrices, setting.rest, 0
        self.momenta, self.m, self.v = (
            [torch.zeros_like(p) for p in ps] for ps in (self.matrices, self.rest, self.rest)
        )

    @torch.no_grad()
    def step(self):
        self.t += 1
        shapes = {}
        for p, momentum in zip(self.matrices, self.momenta, strict=True):
            momentum.mul_(MU).add_(p.grad)
            shapes.setdefault(p.shape, []).append((p, momentum))
        for (rows, columns), pairs in shapes.items():
            x = torch.stack([momentum for _, momentum in pairs])
            x = self.orthogonalized(x) if rows <= columns else self.orthogonalized(x.mT).mT
            for (p, _), direction in zip(pairs, x, strict=True):
                p.mul_(1 - LR * DECAY).sub_(direction, alpha=LR * math.sqrt(rows / columns))
        for p, m, v in zip(self.rest, self.m, self.v, strict=True):
            m.lerp_(p.grad, 1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(p.grad, p.grad, value=1 - BETAS[1])
            p.mul_(1 - LR * DECAY)
            denominator = (v.sqrt() / math.sqrt(1 - BETAS[1] ** self.t)).add_(EPSILON)
            p.addcdiv_(m, denominator, value=-LR / (1 - BETAS[0] ** self.t))

    @staticmethod
    def orthogonalized(x):
        x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + EPSILON)
        for a, b, c in COEFFICIENTS["polar_express"]:
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        return x


def native(cls, setting):
    return cls([{"params": setting.matrices}, {"params": setting.rest, "algorithm": "adamw"}], lr=LR)


def torch_adamw(setting):
    return torch.optim.AdamW(setting.rest, lr=LR, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True)


class Together:
    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def torch_muon(setting):
    muon = torch.optim.Muon(setting.matrices, lr=LR, momentum=MU, weight_decay=DECAY, nesterov=False)
    return Together(muon, torch_adamw(setting))


def pytorch_optimizer_muon(setting):
    groups = [
        {"params": setting.matrices, "use_muon": True, "lr": LR, "weight_decay": DECAY, "nesterov": False},
        {"params": setting.rest, "use_muon": False, "lr": LR, "betas": BETAS, "weight_decay": DECAY},
    ]
    return pytorch_optimizer.Muon(groups)


def upstream_muon(setting):
    groups = [{"params": setting.matrices}, {"params": setting.rest, "algorithm": "adamw", "betas": BETAS}]
    return upstream.build(sb.MuonConfig(lr=LR, weight_decay=DECAY, no_compile=True), groups, {})


PEERS = {
    "prototype": Prototype,
    "native Muon": lambda s: native(optim.Muon, s),
    "native NorMuon": lambda s: native(optim.NorMuon, s),
    "native Dion2": lambda s: native(optim.Dion2, s),
    "native Dion": lambda s: native(optim.Dion, s),
    "native Muon, matrices": lambda s: optim.Muon([{"params": s.matrices}], lr=LR),
    "native Dion2, matrices": lambda s: optim.Dion2([{"params": s.matrices}], lr=LR),
    "native AdamW groups": lambda s: optim.Muon([{"params": s.rest, "algorithm": "adamw"}], lr=LR),
    "torch fused AdamW": torch_adamw,
}
BFLOAT16_PEERS = {  # 10 to 20 s a step at width 256 on a CPU without bfloat16 matrix units
    "torch.optim.Muon": torch_muon,
    "pytorch_optimizer.Muon": pytorch_optimizer_muon,
    **({"upstream Muon, eager": upstream_muon} if upstream.available() else {}),
}


def matmul_rate():
    """Return this machine's float32 operations a second, on batches of the shapes at hand and on large matrices."""
    best = 0.0
    for shape in ((1024, 1024), (16, 256, 256)):
        a = torch.ones(shape)
        operations = 2 * a.numel() * shape[-1]
        best = max(best, *(operations / timed(lambda a=a: a @ a) for _ in range(10)))
    return best


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def show(width, times, floor):
    base = times["prototype"]
    threads = torch.get_num_threads()
    lines = [f"\nwidth {width}, depth {SIZES[width]}, {threads} threads: ms a step, over prototype, over floor"]
    lines += [f"  {name:26} {1e3 * t:10.2f} {t / base:8.2f} {t / floor:8.2f}" for name, t in times.items()]
    lines += [f"  {'floor':26} {1e3 * floor:10.2f} {floor / base:8.2f}"]
    dion2 = times["native Dion2, matrices"] / times["native Muon, matrices"]
    scalar = times["native AdamW groups"] / times["torch fused AdamW"]
    lines += [f"  matrices: Dion2 (fraction 0.25) over Muon {dion2:.2f}; AdamW groups over torch's fused {scalar:.2f}"]
    return "\n".join(lines)


@pytest.fixture
def all_cores():
    """The tests' environment holds torch to one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("all_cores")
@pytest.mark.parametrize("width", SIZES)
def test_step(benchmark, capsys, width):
    measured = benchmark.enabled
    peers = PEERS | (BFLOAT16_PEERS if measured or width < 256 else {})
    settings = {name: Setting.of(width) for name in peers}
    steps = {name: make(settings[name]).step for name, make in peers.items()}
    times = {name: [] for name in peers}
    for step in steps.values():  # warm up
        step()
    first, second = (settings[name] for name in ("prototype", "native Muon"))
    for a, b in zip(first.matrices + first.rest, second.matrices + second.rest, strict=True):
        torch.testing.assert_close(a, b, atol=AGREE, rtol=0)

    shuffle = random.Random(0).sample

    def others():
        for name, step in shuffle(list(steps.items()), len(steps)):
            if name != "native Muon" and (len(times[name]) < 2 or times[name][-1] < SLOW):
                times[name].append(timed(step))

    def once():
        times["native Muon"].append(timed(steps["native Muon"]))

    benchmark.pedantic(once, setup=others, rounds=ROUNDS[width])
    if measured:
        typical = {name: statistics.quantiles(ts, n=10)[0] if len(ts) > 10 else min(ts) for name, ts in times.items()}
        floor = Setting.of(width).floor_operations() / matmul_rate()
        benchmark.extra_info.update({name: t / typical["prototype"] for name, t in typical.items()})
        with capsys.disabled():
            print(show(width, typical, floor))
