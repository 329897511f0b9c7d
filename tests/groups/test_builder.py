"""The reference's contract, and config + model -> optimizer: what is built, what is refused, what is left alone."""

import functools
import logging
import random
import types
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import sandbox.optim
from sandbox import config
from sandbox.groups import builder
from sandbox.groups.builder import build_dion_optimizer, build_optimizer, is_dion_optimizer, separate_param_groups
from sandbox.model import GPT

RATES = {"lr": 0.02, "embed_lr": 0.01, "scalar_lr": 0.003, "weight_decay": 0.1}
FAMILY = [config.MuonConfig, config.NorMuonConfig, config.Dion2Config, config.DionConfig]
ALL = [*FAMILY, config.AdamWConfig]


def gpt(**options):
    return GPT(config.ModelConfig(vocab_size=64, width=16, context=16, **options))


def step(model, optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


# --- The contract -------------------------------------------------------------------------------------------------


def foreign(**values):
    required = {"lr": 0.02, "weight_decay": 0.1, "scalar_opt": "lion", "scalar_betas": [0.9, 0.99], "scalar_eps": None}
    return types.SimpleNamespace(**required | values)


def test_any_object_with_the_protocols_attributes_will_do():
    groups, mesh_kwargs = build_dion_optimizer(foreign(), gpt())
    assert mesh_kwargs == {}
    assert [group["role"] for group in groups] == ["matrix", "vector", "embed", "lm_head"]
    assert groups[0].keys() == {"params", "role"}
    for group in groups[1:]:
        assert group.keys() == {"params", "role", "algorithm", "lr", "weight_decay", "beta1", "beta2"}
        assert (group["algorithm"], group["beta1"], group["beta2"]) == ("lion", 0.9, 0.99)
    assert [group["lr"] for group in groups[1:]] == [0.02, 0.02, 0.005]


@pytest.mark.parametrize("name", ["lr", "weight_decay", "scalar_opt", "scalar_betas", "scalar_eps"])
def test_a_missing_required_attribute_is_refused_by_name(name):
    values = foreign()
    delattr(values, name)
    with pytest.raises(ValueError, match=f"lacks {name};"):
        build_dion_optimizer(values, gpt())


def test_a_policy_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="GroupPolicy"):
        build_dion_optimizer(foreign(policy="upstream"), gpt())


def test_separate_param_groups_takes_the_references_arguments_in_its_order():
    positional = separate_param_groups(gpt(), 0.02, "lion", 0.1, (0.9, 0.99), None, None, None, None)
    contract, _ = build_dion_optimizer(foreign(), gpt())
    for ours, theirs in zip(positional, contract, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def test_the_references_own_names_can_be_imported():
    from sandbox.builder import _DionFamilyConfig, _get_dion_mesh, _import_error, _separate_param_groups, logger

    assert _separate_param_groups is builder.separate_param_groups
    assert _get_dion_mesh is builder.get_dion_mesh
    assert _import_error is None or isinstance(_import_error, Exception)
    assert {"lr", "weight_decay", "scalar_opt", "scalar_betas", "scalar_eps"} == set(_DionFamilyConfig.__annotations__)
    assert logger.name == "sandbox.builder"


@pytest.mark.parametrize(
    ("mesh_kwarg", "expected"), [("distributed_mesh", True), ("outer_shard_mesh", True), (None, False)]
)
def test_the_mesh_goes_under_the_name_that_the_constructor_has(mesh_kwarg, expected):
    mesh = object()  # without ndim: a process group, taken as it is
    _, kwargs = build_dion_optimizer(foreign(), gpt(), mesh, mesh_kwarg)
    assert kwargs == ({mesh_kwarg: mesh} if expected else {})


def test_one_line_a_group_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="sandbox.builder"):
        build_dion_optimizer(foreign(), gpt())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert lines[2] == "embed: algorithm lion, 1 tensors, 1024 elements, lr 0.02"


def test_the_contracts_groups_build_a_native_optimizer():
    model = gpt()
    groups, _ = build_dion_optimizer(foreign(), model)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, sandbox.optim.Muon(groups, lr=0.02))
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_contracts_groups_give_gpt2_the_true_rate_scale():
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    groups, _ = build_dion_optimizer(config.MuonConfig(lr=0.02), model)
    optimizer = sandbox.optim.Muon(groups, lr=0.02, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer)
    for name, parameter in model.named_parameters():
        if "c_attn.weight" in name or "c_fc.weight" in name:
            fan_in, fan_out = parameter.shape
            size = torch.linalg.matrix_norm(parameter - before[name], 2).item()
            # the largest singular value of the approximate polar factor lies within 20 % of 1
            assert size == pytest.approx(0.02 * (fan_out / fan_in) ** 0.5, rel=0.2)


# --- Which factories are of the family ----------------------------------------------------------------------------


class Mine(sandbox.optim.Muon):
    pass


def upstream_class(module):
    return type("Muon", (torch.optim.Optimizer,), {"__module__": module})


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (sandbox.optim.Muon, True),
        (sandbox.optim.Dion, True),
        (Mine, True),
        (functools.partial(sandbox.optim.NorMuon, lr=0.1), True),
        (functools.partial(functools.partial(sandbox.optim.Dion2, lr=0.1), mu=0.9), True),
        (config.MuonConfig(), True),
        (config.DionConfig, True),
        (upstream_class("dion"), True),
        (functools.partial(upstream_class("dion.muon"), lr=0.1), True),
        (upstream_class("dionysus.muon"), False),
        (upstream_class("dion_extra"), False),
        (torch.optim.Muon, False),
        (torch.optim.AdamW, False),
        (functools.partial(torch.optim.Muon, lr=0.1), False),
        (config.AdamWConfig(), False),
        (sandbox.optim.NonFiniteGradient, False),
        (sandbox.optim.orthogonalize, False),
        ("dion.Muon", False),
        (None, False),
    ],
    ids=str,
)
def test_dion_optimizers_are_told_from_others(factory, expected):
    assert is_dion_optimizer(factory) is expected


def test_an_instance_is_told_as_its_class():
    assert is_dion_optimizer(config.MuonConfig().build(gpt()))


# --- Building -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("tied", [False, True])
def test_every_config_builds_an_optimizer_that_moves_every_parameter(kind, tied):
    model = gpt(tied=tied)
    optimizer = kind(**RATES).build(model)
    assert type(optimizer).__name__ == kind.__name__.removesuffix("Config")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == before.keys()


@pytest.mark.parametrize("kind", ALL)
def test_every_group_says_what_it_is(kind):
    model = gpt()
    optimizer = kind(**RATES).build(model)
    names = {id(p): name for name, p in model.named_parameters()}
    rates = {"matrix": 0.02, "vector": 0.003, "embed": 0.01, "lm_head": 0.02 if kind is config.AdamWConfig else 0.005}
    assert [group["role"] for group in optimizer.param_groups] == list(rates)
    for group in optimizer.param_groups:
        assert group["param_names"] == [names[id(p)] for p in group["params"]]
        assert group["lr"] == group["initial_lr"] == rates[group["role"]]
        assert group["weight_decay"] == (0.1 if group["role"] in ("matrix", "vector") else 0.0)


def test_the_options_of_a_config_reach_the_optimizer():
    options = {"mu": 0.8, "betas": (0.7, 0.8), "epsilon": 1e-6, "adjust_lr": "rms_norm", "nesterov": True}
    optimizer = config.MuonConfig(**options, cautious_wd=True, scalar_betas=(0.5, 0.6), scalar_eps=1e-4).build(gpt())
    matrix, vector, *_ = optimizer.param_groups
    assert [matrix[key] for key in ("mu", "beta1", "beta2", "epsilon")] == [0.8, 0.7, 0.8, 1e-6]
    assert (matrix["adjust_lr"], matrix["nesterov"], matrix["cautious_wd"]) == ("rms_norm", True, True)
    assert [vector[key] for key in ("beta1", "beta2", "epsilon", "cautious_wd")] == [0.5, 0.6, 1e-4, True]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=4),
    ],
)
def test_a_schedule_keeps_the_ratios_of_the_rates_and_the_zero_decays(kind, schedule):
    model = gpt()
    optimizer = kind(lr=1e-2, scalar_lr=1e-3, embed_lr=2e-3, lm_head_lr=3e-4, weight_decay=0.1).build(model)
    scheduler = schedule(optimizer)
    for seed in range(4):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert [rate / rates[0] for rate in rates] == pytest.approx([1, 0.1, 0.2, 0.03])
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0, 0.0]
        step(model, optimizer, seed)
        scheduler.step()


def test_a_factory_is_called_with_the_model():
    optimizer = build_optimizer(config.Factory.of(sgd, lr=0.5), gpt())
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.SGD, 0.5)


def sgd(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_something_else_than_a_config_is_refused():
    with pytest.raises(ValueError, match=r"SimpleNamespace.*MuonConfig"):
        build_optimizer(foreign(), gpt())


@pytest.mark.parametrize("kind", ALL)
def test_a_model_without_a_trainable_parameter_is_refused(kind):
    with pytest.raises(ValueError, match="no trainable parameter"):
        kind().build(nn.LayerNorm(3).requires_grad_(False))


@pytest.mark.parametrize("kind", FAMILY)
def test_a_model_without_a_matrix_is_refused(kind):
    with pytest.raises(ValueError, match=rf"no matrix.*{kind.__name__}.*AdamWConfig"):
        kind().build(nn.ModuleList([nn.Embedding(9, 4), nn.LayerNorm(4)]))


@pytest.mark.parametrize("kind", ALL)
def test_a_heads_rate_for_a_tied_model_is_refused(kind):
    with pytest.raises(ValueError, match=r"lm_head_lr=0.1 was given for a model without a head"):
        kind(lm_head_lr=0.1).build(gpt(tied=True))


def test_an_override_to_lion_is_refused_by_the_baseline():
    policy = config.GroupPolicy(overrides=(config.Override(pattern="embed.weight", role="embed", algorithm="lion"),))
    with pytest.raises(ValueError, match="'lion'"):
        config.AdamWConfig(policy=policy).build(gpt())


def test_a_low_share_and_a_rate_without_effect_are_logged_once(caplog):
    model = nn.ModuleDict({"q": nn.Linear(3, 5, bias=False), "embed": nn.Embedding(77, 3)})
    with caplog.at_level(logging.WARNING, logger="sandbox.builder"):
        for _ in range(2):
            config.MuonConfig(scalar_lr=0.0071, embed_lr=0.01).build(model)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "scalar_lr=0.0071 reaches no parameter, none is vector",
        "only 6% of the 246 elements are under the orthogonal optimizer",
    ]


# --- What is left alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILY)
def test_building_flips_no_process_wide_switch(kind):
    dynamo = torch._dynamo.config
    before = (dynamo.disable, dynamo.suppress_errors, torch.get_num_threads(), torch.is_grad_enabled())
    step(model := gpt(), kind(no_compile=True).build(model))
    assert (dynamo.disable, dynamo.suppress_errors, torch.get_num_threads(), torch.is_grad_enabled()) == before
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert compiled(torch.zeros(1)).item() == 1
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0  # the compiler is still at work


@pytest.mark.parametrize("kind", ALL)
def test_building_and_stepping_leaves_the_global_generators_alone(kind):
    model = gpt()
    before = torch.get_rng_state(), random.getstate()
    step(model, kind().build(model))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_building_leaves_the_model_as_it_was():
    model = gpt()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config.MuonConfig().build(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == dict.fromkeys(before, True)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# --- Distributed checkpoints --------------------------------------------------------------------------------------


def without_vectors():
    return nn.ModuleDict(
        {"embed": nn.Embedding(64, 8), "q": nn.Linear(8, 8, bias=False), "lm_head": nn.Linear(8, 64, bias=False)}
    )


def without_a_head():
    return nn.ModuleDict({"embed": nn.Embedding(64, 8), "q": nn.Linear(8, 8)})


def with_frozen_matrices():
    model = gpt(depth=1)
    model.blocks.requires_grad_(False)
    model.blocks[0].attn_norm.requires_grad_(True)
    return model


@pytest.mark.parametrize("make", [gpt, without_vectors, without_a_head, with_frozen_matrices])
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.filterwarnings("ignore:all .* matrices are frozen")
@pytest.mark.filterwarnings("ignore:.*torch.distributed:UserWarning")  # one process: dcp says so
def test_a_distributed_checkpoint_is_saved_loaded_and_stepped(make, kind, tmp_path):
    torch.manual_seed(0)
    options = config.AdamWConfig(lr=0.02) if kind is config.AdamWConfig else kind(lr=0.02)
    straight, resumed = make(), make()
    resumed.load_state_dict(straight.state_dict())
    optimizer = options.build(straight)
    assert all(group["params"] for group in optimizer.param_groups)
    for seed in range(2):
        step(straight, optimizer, seed)
    weights, state = get_state_dict(straight, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
    step(straight, optimizer, seed=2)

    fresh = options.build(resumed)
    weights, state = get_state_dict(resumed, fresh)
    held = {"model": weights, "optimizer": state}
    dcp.load(held, checkpoint_id=tmp_path / "saved", no_dist=True)
    set_state_dict(resumed, fresh, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    step(resumed, fresh, seed=2)
    for ours, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# --- What "auto" means --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "device", "dtype", "orthogonalize"),
    [(False, "cpu", "float32", "float32"), (True, "cuda", "bfloat16", "bfloat16")],
)
def test_auto_is_resolved_by_the_device(monkeypatch, cuda, device, dtype, orthogonalize):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    run = builder.resolve_auto(config.RunConfig())
    assert (run.device, run.dtype, run.optimizer.orthogonalize_dtype, run.context) == (
        device,
        dtype,
        orthogonalize,
        128,
    )


def test_upstream_is_said_to_orthogonalize_in_bfloat16_as_it_does():
    run = config.RunConfig(device="cpu", optimizer=config.MuonConfig(backend="dion"))
    assert builder.resolve_auto(run).optimizer.orthogonalize_dtype == "bfloat16"


def test_auto_resolved_twice_is_auto_resolved_once():
    run = builder.resolve_auto(config.RunConfig())
    assert builder.resolve_auto(run) == run


def test_what_is_set_stays_set():
    optimizer = config.MuonConfig(orthogonalize_dtype="bfloat16")
    run = config.RunConfig(device="cpu", dtype="bfloat16", context=64, optimizer=optimizer)
    assert builder.resolve_auto(run) == run


def test_a_login_node_resolves_runs_of_gpu_nodes_as_they_would(monkeypatch):
    run = config.RunConfig(device="cuda", optimizer=config.MuonConfig(backend="native"))
    resolved = []
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        resolved.append(builder.resolve_auto(run))
    assert resolved[0] == resolved[1]
    assert (resolved[0].dtype, resolved[0].optimizer.orthogonalize_dtype) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("cuda", "installed", "expected"), [(True, True, "dion"), (True, False, "native"), (False, True, "native")]
)
def test_the_backend_is_upstream_on_cuda_where_it_is_installed(monkeypatch, cuda, installed, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(
        builder.importlib.util, "find_spec", lambda name: object() if installed and name == "dion" else None
    )
    run = config.RunConfig(optimizer=config.MuonConfig(backend="auto"))
    assert builder.resolve_auto(run).optimizer.backend == expected
    assert builder.resolve_auto(replace(run, optimizer=config.AdamWConfig())).optimizer == config.AdamWConfig()
