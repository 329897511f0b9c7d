"""The adapter to microsoft/dion, against a stand-in of its constructors and its handling of rates.

No package index has the real one. Where it is installed, the last tests here run it: eagerly, on a CPU.
"""

import copy
import importlib.metadata
import json
import os
import sys
import types

import pytest
import torch

import sandbox as sb
from sandbox import optim
from sandbox.config import Dion2Config, DionConfig, MuonConfig, NorMuonConfig
from sandbox.groups import upstream

CONFIGS = (MuonConfig, NorMuonConfig, Dion2Config, DionConfig)
every = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
COMMIT = "0a059a4542e5aa74b40dcd1dce363836c7afcd48"
compiled = []  # graphs that the stand-in's step had compiled


def backend(graph, example_inputs):
    compiled.append(graph)
    return graph.forward


@torch.compile(backend=backend)
def scaled(gradient, lr):
    return gradient * lr


class StandIn(torch.optim.Optimizer):
    """Takes what upstream's classes take, holds rates in tensors as they do, and steps by plain descent."""

    allowed = frozenset()

    def __init__(self, params, distributed_mesh=None, **kwargs):
        assert kwargs.keys() <= self.allowed, kwargs.keys() - self.allowed
        self.mesh, self.kwargs = distributed_mesh, kwargs
        super().__init__(params, {"lr": kwargs["lr"], "algorithm": "own", "step": 0})
        self.synchronize()

    def synchronize(self):
        for group in self.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))

    @torch.no_grad()
    def step(self, closure=None):
        self.synchronize()
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                p.sub_(scaled(p.grad, group["lr"]))

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.synchronize()


ITERATED = {"lr", "betas", "weight_decay", "epsilon", "adjust_lr", "flatten", "use_triton", "use_polar_express"}
TAKES = {
    "Muon": ITERATED | {"mu", "nesterov", "cautious_wd"},
    "NorMuon": ITERATED | {"mu", "nesterov", "cautious_wd", "muon_beta2"},
    "Dion2": ITERATED | {"fraction", "ef_decay", "selection_scope"},
    "Dion": {"lr", "mu", "betas", "weight_decay", "epsilon", "rank_fraction", "rank_multiple_of", "power_iters"}
    | {"qr_method"},
}


@pytest.fixture
def standin(monkeypatch):
    module = types.ModuleType("dion")
    for name, takes in TAKES.items():
        setattr(module, name, type(name, (StandIn,), {"__module__": "dion.standin", "allowed": takes}))
    monkeypatch.setitem(sys.modules, "dion", module)
    upstream._adapted.cache_clear()
    return module


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "dion", None)


def gpt():
    return sb.GPT(sb.ModelConfig(vocab_size=32, width=8, depth=1, context=8))


def parameter():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    return p


@pytest.mark.usefixtures("missing")
def test_where_it_is_missing_the_error_has_the_install_line():
    assert not upstream.available()
    with pytest.raises(RuntimeError, match=f"pip install .dion @ git.https://github.com/microsoft/dion.git@{COMMIT}"):
        upstream.build(MuonConfig(), [{"params": [parameter()]}], {})


def test_another_package_of_that_name_is_not_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dion", types.ModuleType("dion"))
    assert not upstream.available()
    with pytest.raises(RuntimeError, match=r"no optimizer Muon.*pip install"):
        upstream.load()


@every
def test_every_option_reaches_the_constructor_and_no_other_does(standin, config):
    asked = config(lr=0.5, weight_decay=0.25, betas=(0.8, 0.9))
    optimizer = upstream.build(asked, [{"params": [parameter()]}], {})
    name = config.__name__.removesuffix("Config")
    assert isinstance(optimizer, getattr(standin, name))
    assert optimizer.kwargs == {key: getattr(asked, key) for key in TAKES[name]}


def test_the_mesh_reaches_the_constructor(standin):
    mesh = object()
    assert upstream.build(MuonConfig(), [{"params": [parameter()]}], {"distributed_mesh": mesh}).mesh is mesh


@pytest.mark.usefixtures("standin")
def test_what_upstream_would_ignore_is_translated_or_refused():
    group = {"params": [parameter()], "betas": (0.5, 0.6), "eps": 0.1, "role": "vector"}
    optimizer = upstream.build(MuonConfig(), [group], {})
    found = {key: optimizer.param_groups[0].get(key) for key in ("beta1", "beta2", "epsilon", "betas", "eps", "role")}
    assert found == {"beta1": 0.5, "beta2": 0.6, "epsilon": 0.1, "betas": None, "eps": None, "role": "vector"}
    assert group.keys() == {"params", "betas", "eps", "role"}
    for config in (Dion2Config(cautious_wd=True), DionConfig(cautious_wd=True)):
        with pytest.raises(ValueError, match=r"cautious_wd=True.*native"):
            upstream.build(config, [group], {})
    with pytest.raises(ValueError, match=r"transposed=True.*native"):
        upstream.build(MuonConfig(), [{"params": [parameter()], "transposed": True}], {})


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("no_compile", [False, True])
def test_rates_stay_the_numbers_that_were_given(no_compile):
    groups = [{"params": [parameter()], "lr": 0.1}, {"params": [parameter()]}]
    optimizer = upstream.build(MuonConfig(lr=0.3, no_compile=no_compile), groups, {})

    def rates():
        return [group["lr"] for group in optimizer.param_groups]

    assert rates() == [0.1, 0.3]
    optimizer.step()
    assert rates() == [0.1, 0.3]
    optimizer.load_state_dict(optimizer.state_dict())
    assert rates() == [0.1, 0.3]


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("schedule", ["hand", "torch"])
def test_a_schedule_drives_the_steps(schedule):
    p, q = parameter(), parameter()
    optimizer = upstream.build(MuonConfig(lr=0.4, no_compile=True), [{"params": [p]}, {"params": [q], "lr": 0.2}], {})
    first = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step) if schedule == "torch" else None
    for step in range(3):
        if scheduler is None:
            for group, lr in zip(optimizer.param_groups, first, strict=True):
                group["lr"] = lr * 0.5**step
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    moved = 1 + 0.5 + 0.25
    torch.testing.assert_close(p.data, torch.full((3,), 1 - 0.4 * moved))
    torch.testing.assert_close(q.data, torch.full((3,), 1 - 0.2 * moved))


@pytest.mark.usefixtures("standin")
def test_no_compile_acts_on_this_optimizer_alone():
    def switches():
        return torch._dynamo.config.disable, os.environ.get("TORCHDYNAMO_DISABLE"), torch._dynamo.config.suppress_errors

    before = switches()
    eager = upstream.build(MuonConfig(no_compile=True), [{"params": [parameter()]}], {})
    usual = upstream.build(MuonConfig(), [{"params": [parameter()]}], {})
    torch.compiler.reset()  # other tests have had the same function compiled
    compiled.clear()
    eager.step()
    assert compiled == []
    eager.step(lambda: scaled(torch.ones(2), torch.tensor(2.0)))
    assert len(compiled) == 1  # the closure is the caller's
    compiled.clear()
    usual.step()
    assert len(compiled) == 1
    assert switches() == before


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("no_compile", [False, True])
def test_step_hooks_run_once(no_compile):
    optimizer = upstream.build(MuonConfig(no_compile=no_compile), [{"params": [parameter()]}], {})
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]


@pytest.mark.usefixtures("standin")
@every
def test_a_config_builds_it_over_a_model(config):
    optimizer = config(backend="dion", lr=0.5, embed_lr=0.1, no_compile=True).build(gpt())
    assert sb.is_dion_optimizer(optimizer)
    rates = {group["role"]: group["lr"] for group in optimizer.param_groups}
    assert (rates["matrix"], rates["embed"]) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ({"url": "https://github.com/microsoft/dion.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}, COMMIT),
        (None, "0.1.0"),
    ],
)
def test_the_commit_is_what_pip_noted(monkeypatch, origin, expected):
    found = types.SimpleNamespace(version="0.1.0", read_text=lambda name: origin and json.dumps(origin))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
    assert upstream.commit() == expected


def test_without_upstream_there_is_no_commit(monkeypatch):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    assert upstream.commit() is None


installed = pytest.mark.skipif(not upstream.available(), reason="microsoft/dion is on no package index")
BFLOAT16 = 0.02  # upstream orthogonalizes in bfloat16: 0.4% of a step, times three steps of at most 0.02 * 2


def trained(optimizer, model, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@installed
@every
def test_the_real_one_agrees_with_the_native_one_and_exchanges_states_with_it(config):
    options = {"lr": 0.02, "embed_lr": 0.01, "lm_head_lr": 0.003, "scalar_lr": 0.003, "no_compile": True}
    (ours, native), (theirs, real) = (
        (model, config(backend=backend, **options).build(model)) for backend in ("native", "dion") for model in [gpt()]
    )
    theirs.load_state_dict(ours.state_dict())
    if config is DionConfig:  # whose first Q upstream draws from the global generator
        real.load_state_dict(copy.deepcopy(native.state_dict()))
    trained(native, ours, range(3))
    trained(real, theirs, range(3))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=BFLOAT16, rtol=0)
    states = copy.deepcopy((native.state_dict(), real.state_dict()))
    assert [s.keys() for s in states[0]["state"].values()] == [s.keys() for s in states[1]["state"].values()]
    native.load_state_dict(states[1])
    real.load_state_dict(states[0])
    trained(native, ours, range(3, 5))
    trained(real, theirs, range(3, 5))
    assert isinstance(native, getattr(optim, config.__name__.removesuffix("Config")))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=BFLOAT16, rtol=0)
