"""The shell of the Dion family: which groups it takes, which it refuses, and which rates it applies."""

import inspect
import types

import pytest
import torch

import sandbox as sb
from sandbox.optim import Dion, Dion2, Muon, NonFiniteGradient, NorMuon

ALL = (Muon, NorMuon, Dion2, Dion)
every = pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
# Upstream's constructor arguments in its order (dion/*.py of the commit in tests/golden/README.md).
SIGNATURES = {
    Muon: "params distributed_mesh lr mu betas weight_decay cautious_wd epsilon nesterov adjust_lr flatten "
    "use_gram_newton_schulz use_triton use_polar_express newton_schulz_func",
    NorMuon: "params distributed_mesh lr mu muon_beta2 betas weight_decay cautious_wd epsilon nesterov adjust_lr "
    "flatten use_gram_newton_schulz use_triton use_polar_express newton_schulz_func",
    Dion2: "params distributed_mesh lr fraction ef_decay betas weight_decay epsilon adjust_lr flatten use_triton "
    "use_polar_express use_gram_newton_schulz newton_schulz_func verbose triton_post_ortho selection_scope",
    Dion: "params replicate_mesh outer_shard_mesh inner_shard_mesh replicate_mesh_grad_sync rank_fraction "
    "rank_multiple_of lr mu betas weight_decay epsilon power_iters qr_method cqr_warmup_steps rcqr_oversample "
    "mixed_precision_config",
}


def parameter(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    p = torch.nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))
    p.grad = torch.randn(*shape, generator=generator).to(dtype)
    return p


@every
def test_arguments_are_upstreams_in_its_order(cls):
    positional = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[cls].split()


@every
def test_class_defaults_are_upstreams(cls):
    group = cls([parameter(4, 3)]).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["epsilon"]) == (0.01, 0.01, 1e-8)
    assert (group["beta1"], group["beta2"], group["algorithm"]) == (0.9, 0.95, cls.algorithm)


@pytest.mark.parametrize("switch", ["use_triton", "use_gram_newton_schulz", "triton_post_ortho"])
def test_kernel_switches_are_refused_by_name(switch):
    with pytest.raises(ValueError, match=f"{switch}=True.*backend='dion'"):
        Dion2([parameter(4, 3)], **{switch: True})


@every
def test_betas_and_eps_reach_their_rule(cls):
    p, q = parameter(5), parameter(5)
    cls([{"params": [p], "algorithm": "adamw", "betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.0}], lr=0.1).step()
    torch.optim.AdamW([q], lr=0.1, betas=(0.5, 0.6), eps=0.1, weight_decay=0.0).step()
    assert torch.equal(p, q)


@every
@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"momentumm": 0.9}, "momentumm"),
        ({"weight_deacy": 0.1}, "did you mean 'weight_decay'"),
        ({"betas": (0.9, 0.9), "beta1": 0.5}, "once"),
        ({"lr": -0.1}, "lr=-0.1"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"beta1": 1.0}, "beta1=1.0"),
        ({"algorithm": "adam"}, "did you mean 'adamw'"),
        ({"algorithm": "adamw", "transposed": True}, "no use"),
        ({"flatten": 1}, "flatten=1"),
    ],
)
def test_what_a_group_may_not_hold_is_named(cls, extra, told):
    with pytest.raises(ValueError, match=told):
        cls([{"params": [parameter(4, 3)], **extra}])


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (Muon, {"adjust_lr": "spectral"}),
        (Muon, {"mu": 1.5}),
        (Muon, {"newton_schulz_func": 3}),
        (Muon, {"orthogonalize_dtype": "float16"}),
        (NorMuon, {"muon_beta2": -0.1}),
        (Dion2, {"fraction": 0.0}),
        (Dion2, {"selection_scope": "globl"}),
        (Dion, {"rank_fraction": 1.5}),
        (Dion, {"rank_multiple_of": 0}),
        (Dion, {"mixed_precision_config": object()}),
        (Dion, {"qr_method": "svd"}),
    ],
)
def test_values_that_are_not_allowed_are_refused(cls, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        cls([parameter(4, 3)], **arguments)


@pytest.mark.parametrize(
    ("shape", "options", "told"),
    [
        ((5,), {}, "two or more dimensions"),
        ((6, 4), {"num_heads": 4}, "divide"),
        ((6, 4), {"split_sizes": (2, 3)}, "add up"),
        ((6, 4), {"split_sizes": (2, 4), "num_heads": 2}, "exclude"),
        ((6, 4, 2), {"num_heads": 2}, "two dimensions"),
        ((6, 4, 2), {"flatten": True, "transposed": True}, "exclude"),
    ],
)
def test_a_parameter_that_does_not_fit_its_options_is_named(shape, options, told):
    with pytest.raises(ValueError, match=told) as error:
        Muon([{"params": [("blocks.0.q", parameter(*shape))], **options}])
    assert "blocks.0.q" in str(error.value)


def test_options_of_another_rule_are_unknown():
    with pytest.raises(ValueError, match="no option 'fraction'"):
        Muon([{"params": [parameter(4, 3)], "fraction": 0.5}])
    with pytest.raises(ValueError, match="no option 'split_sizes'"):
        Dion2([{"params": [parameter(4, 3)], "split_sizes": (2, 2)}])


@every
def test_a_parameter_is_taken_once(cls):
    p = parameter(4, 3)
    with pytest.raises(ValueError, match="more than one"):
        cls([{"params": [p]}, {"params": [p]}])
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="twice"):
        cls([{"params": [p, p]}])


@every
def test_a_mesh_of_one_is_no_mesh_and_a_larger_one_is_refused(cls):
    mesh = "outer_shard_mesh" if cls is Dion else "distributed_mesh"
    cls([parameter(4, 3)], **{mesh: types.SimpleNamespace(size=lambda: 1)}).step()
    with pytest.raises(ValueError, match="4 ranks"):
        cls([parameter(4, 3)], **{mesh: types.SimpleNamespace(size=lambda: 4)})


@every
def test_the_callers_groups_are_left_alone(cls):
    group = {"params": [parameter(4, 3)], "eps": 1e-6, "role": "matrix"}
    cls([group]).step()
    assert group.keys() == {"params", "eps", "role"}


@every
@pytest.mark.parametrize(("shape", "scale"), [((256, 64), 2.0), ((64, 256), 0.5)])
def test_spectral_scale_multiplies_the_rate_and_not_the_decay(cls, shape, scale):
    # The direction's norm against that of a square matrix of the same shorter side: both orthonormal.
    def change(p, **kwargs):
        before = p.detach().clone()
        cls([p], lr=0.1, **kwargs).step()
        return p.detach() - before

    exact = {} if cls is Dion else {"newton_schulz_func": polar}
    full = {"fraction": 1.0} if cls is Dion2 else {}
    moved = change(parameter(*shape), weight_decay=0.0, **exact, **full)
    assert moved.norm().item() == pytest.approx(0.1 * scale * 64**0.5, rel=1e-4)
    still = parameter(*shape)
    still.grad.zero_()
    before = still.detach().clone()
    change(still, weight_decay=0.5, **full)
    torch.testing.assert_close(still.detach(), before * 0.95)


@pytest.mark.parametrize("cls", [Muon, NorMuon, Dion2], ids=lambda c: c.__name__)
@pytest.mark.parametrize("shape", [(256, 64), (64, 256)])
def test_rms_scale_is_that_of_the_longer_side(cls, shape):
    p = parameter(*shape)
    before = p.detach().clone()
    full = {"fraction": 1.0} if cls is Dion2 else {}
    cls([p], lr=0.1, weight_decay=0.0, adjust_lr="rms_norm", newton_schulz_func=polar, **full).step()
    assert (p.detach() - before).norm().item() == pytest.approx(0.1 * 3.2 * 64**0.5, rel=1e-4)


def test_a_config_does_not_lose_a_kernel_switch_on_the_way():
    config = sb.MuonConfig(use_triton=True)
    with pytest.raises(ValueError, match="use_triton=True"):
        config.build(sb.GPT(sb.ModelConfig(width=8, depth=1, context=8)))


def test_the_dtype_to_orthogonalize_in_is_an_option():
    def moved(**options):
        p = parameter(16, 16)
        Muon([p], lr=1.0, weight_decay=0.0, **options).step()
        return p.detach()

    assert torch.equal(moved(), moved(orthogonalize_dtype="float32"))  # auto, on a CPU
    rounding = (moved() - moved(orthogonalize_dtype="bfloat16")).abs().max()
    assert 1e-4 < rounding < 0.1


def test_newton_schulz_is_an_option():
    seen = [parameter(16, 16), parameter(16, 16)]
    for p, polar_express in zip(seen, (True, False), strict=True):
        Muon([p], lr=1.0, use_polar_express=polar_express).step()
    assert (seen[0] - seen[1]).abs().max() > 1e-3


def polar(matrices, epsilon):
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    return u @ vh


def test_a_custom_function_gets_three_dimensions_and_its_shape_is_held():
    seen = []

    def spy(matrices, epsilon):
        seen.append((tuple(matrices.shape), matrices.dtype, epsilon))
        return matrices

    Muon([parameter(4, 3), parameter(4, 3), parameter(2, 5, 3)], newton_schulz_func=spy, epsilon=1e-5).step()
    assert sorted(seen) == [((2, 4, 3), torch.float32, 1e-5), ((2, 5, 3), torch.float32, 1e-5)]
    with pytest.raises(ValueError, match="newton_schulz_func"):
        Muon([parameter(4, 3)], newton_schulz_func=lambda matrices, epsilon: matrices[0]).step()


@every
@pytest.mark.parametrize("schedule", ["lambda", "cosine", "hand"])
def test_a_schedule_keeps_ratios_and_zero_decays(cls, schedule):
    rates, decays = (1e-2, 1e-3, 2e-3, 3e-4), (0.1, 0.1, 0.0, 0.0)
    kinds = (cls.algorithm, "adamw", "lion", "adamw")
    groups = [
        {"params": [parameter(4, 3, seed=i)], "algorithm": kind, "lr": lr, "weight_decay": decay, "initial_lr": lr}
        for i, (kind, lr, decay) in enumerate(zip(kinds, rates, decays, strict=True))
    ]
    optimizer = cls(groups)
    make = {
        "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "hand": lambda: types.SimpleNamespace(
            step=lambda: [g.update(lr=g["initial_lr"] * 0.5) for g in optimizer.param_groups]
        ),
    }[schedule]
    scheduler = make()
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        now = [group["lr"] for group in optimizer.param_groups]
        assert [type(lr) for lr in now] == [float] * 4
        assert [lr / now[0] for lr in now] == pytest.approx([lr / rates[0] for lr in rates], rel=1e-12)
        assert now[0] < rates[0]
        assert [group["weight_decay"] for group in optimizer.param_groups] == list(decays)


@every
def test_a_rate_of_zero_moves_nothing(cls):
    groups = [{"params": [parameter(4, 3)], "algorithm": kind, "lr": 0.0} for kind in (cls.algorithm, "adamw", "lion")]
    before = [group["params"][0].detach().clone() for group in groups]
    cls(groups).step()
    assert all(torch.equal(group["params"][0], b) for group, b in zip(groups, before, strict=True))


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_is_refused_and_nothing_changes(cls, bad, dtype):
    good, vector, spoiled = parameter(4, 3), parameter(5), parameter(6, 4, dtype=dtype)
    groups = [
        {"params": [("good", good), ("spoiled", spoiled)]},
        {"params": [("vector", vector)], "algorithm": "adamw"},
    ]
    optimizer = cls(groups)
    optimizer.step()
    before = [t.detach().clone() for t in (good, vector, spoiled, *tensors(optimizer))]
    spoiled.grad[2, 1] = bad
    with pytest.raises(NonFiniteGradient, match="'spoiled'"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    after = [good, vector, spoiled, *tensors(optimizer)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def tensors(optimizer):
    return [t for state in optimizer.state.values() for t in state.values()]


def test_a_sparse_gradient_is_refused():
    embed = torch.nn.Embedding(5, 3, sparse=True)
    embed(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        Muon([{"params": embed.parameters(), "algorithm": "adamw"}]).step()


@every
def test_step_calls_the_closure_with_gradients_on(cls):
    p = parameter(4, 3)
    optimizer = cls([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(parameter(4, 3).square().sum().item())


@every
def test_mixed_dtypes_step_together(cls):
    matrices = [parameter(6, 4), parameter(6, 4, dtype=torch.bfloat16), parameter(4, 6, dtype=torch.float64)]
    table, gain = parameter(9, 4, dtype=torch.bfloat16), parameter(4)
    before = [t.detach().clone() for t in (*matrices, table, gain)]
    cls([{"params": matrices}, {"params": [table, gain], "algorithm": "adamw"}], lr=0.1).step()
    for p, b in zip((*matrices, table, gain), before, strict=True):
        assert p.dtype == b.dtype
        assert p.isfinite().all()
        assert not torch.equal(p, b)
