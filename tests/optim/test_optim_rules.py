"""The rules of the Dion family: what they equal, and their limits."""

import math

import pytest
import torch

from helpers.optim import ROUND_OFF, assert_same, every, exact, gradients_like, iterated, randn, trajectory
from sandbox.optim import Dion, Dion2, Muon, NorMuon, dion_update, lists, matrices, normuon_update, scalar

# What the rules equal


@every
def test_stacked_equals_separate(cls):
    shapes = [(8, 6), (6, 8), (8, 6), (5, 5), (8, 6), (12, 6), (6, 15), (10, 5)]  # the long ones share their iteration
    initial = [randn(*s, seed=i) for i, s in enumerate(shapes)]
    grads = gradients_like(initial)
    together, _ = trajectory(cls, initial, grads, rank_fraction=0.5) if cls is Dion else trajectory(cls, initial, grads)
    for i, x in enumerate(initial):
        kwargs = {"rank_fraction": 0.5} if cls is Dion else {}
        alone = torch.nn.Parameter(x.clone())
        single = cls([alone], lr=0.1, weight_decay=0.1, **kwargs)
        if cls is Dion:  # the first Q depends on the place
            first = cls([torch.nn.Parameter(x) for x in initial], **kwargs)
            single.state[alone]["Q"].copy_(first.state[first.param_groups[0]["params"][i]]["Q"])
        for step, after in zip(grads, together, strict=True):
            alone.grad = step[i].clone()
            single.step()
            torch.testing.assert_close(alone.detach(), after[i], atol=ROUND_OFF, rtol=0)


@every
def test_many_matrices_go_in_several_stacks_with_the_same_result(cls, monkeypatch):
    initial = [randn(8, 6, seed=i) for i in range(5)] + [randn(4, 8, 6, seed=9)]
    grads = gradients_like(initial)
    at_once, _ = trajectory(cls, initial, grads)
    monkeypatch.setitem(matrices.LARGEST, "cpu", 100)  # elements: two of the five, and less than the last one alone
    assert_same(at_once, trajectory(cls, initial, grads)[0])


@every
def test_torch_without_its_private_functions_gives_the_same(cls, monkeypatch):
    initial = [randn(8, 6), randn(5, seed=1), randn(7, seed=2)]

    def run():
        params = [torch.nn.Parameter(x.clone()) for x in initial]
        kinds = (cls.algorithm, "adamw", "lion")
        optimizer = cls([{"params": [p], "algorithm": kind} for p, kind in zip(params, kinds, strict=True)])
        for step in gradients_like(initial):
            for p, g in zip(params, step, strict=True):
                p.grad = g
            optimizer.step()
        return [params]

    usual = run()
    monkeypatch.setattr(scalar, "_fused_adamw_", None)
    for name in ("add_", "mul_", "copy_", "sign_", "lerp_", "add", "lerp", "norm"):
        monkeypatch.setattr(lists, name, lists.loop(name))
    assert_same(usual, run())


@iterated
@pytest.mark.parametrize("adjust_lr", ["spectral_norm", "rms_norm", None])
def test_heads_equal_separate_parameters(cls, adjust_lr):
    whole = randn(12, 5)
    grads = gradients_like([whole])
    one, _ = trajectory(cls, [whole], grads, group={"num_heads": 3}, adjust_lr=adjust_lr)
    parts, _ = trajectory(cls, whole.split(4), [g.split(4) for (g,) in grads], adjust_lr=adjust_lr)
    assert_same(one, [[torch.cat(p)] for p in parts])


@pytest.mark.parametrize("cls", [Muon, NorMuon], ids=lambda c: c.__name__)
@pytest.mark.parametrize("adjust_lr", ["spectral_norm", "rms_norm", None])
def test_row_blocks_equal_separate_parameters(cls, adjust_lr):
    whole, sizes = randn(14, 5), [8, 2, 4]
    grads = gradients_like([whole])
    one, _ = trajectory(cls, [whole], grads, group={"split_sizes": sizes}, adjust_lr=adjust_lr)
    parts, _ = trajectory(cls, whole.split(sizes), [g.split(sizes) for (g,) in grads], adjust_lr=adjust_lr)
    assert_same(one, [[torch.cat(p)] for p in parts])


@every
def test_a_stack_of_experts_moves_as_its_slices_do(cls):
    whole = randn(3, 6, 4)
    grads = gradients_like([whole])
    one, _ = trajectory(cls, [whole], grads)
    if cls is Dion:
        expected = []
        for e in range(3):
            p = torch.nn.Parameter(whole[e].clone())
            single = cls([p], lr=0.1, weight_decay=0.1)
            single.state[p]["Q"].copy_(cls([torch.nn.Parameter(whole)]).state.popitem()[1]["Q"][e])
            for (g,) in grads:
                p.grad = g[e].clone()
                single.step()
            expected.append(p.detach())
        assert_same(one[-1:], [[torch.stack(expected)]])
        return
    slices, _ = trajectory(cls, whole.unbind(), [g.unbind() for (g,) in grads])
    assert_same(one, [[torch.stack(s)] for s in slices])


@every
def test_flatten_is_each_tensors_own_whatever_its_siblings(cls):
    siblings = [randn(6, 4), randn(6, 2, 2, 3, seed=1), randn(6, 12, seed=2)]
    grads = gradients_like(siblings)
    one, _ = trajectory(cls, siblings, grads, flatten=True)
    flat, _ = trajectory(cls, [t.flatten(1) for t in siblings], [[g.flatten(1) for g in step] for step in grads])
    assert_same(one, [[x.reshape(t.shape) for x, t in zip(step, siblings, strict=True)] for step in flat])


@every
def test_flatten_follows_a_weight_of_another_memory_format(cls):
    weight = randn(6, 4, 3, 3)
    grads = gradients_like([weight])
    plain, _ = trajectory(cls, [weight], grads, flatten=True)
    turned, _ = trajectory(cls, [weight.to(memory_format=torch.channels_last)], grads, flatten=True)
    assert_same(plain, turned)


@every
@pytest.mark.parametrize("shape", [(4, 12), (12, 4), (6, 6)])
def test_a_transposed_weight_moves_as_its_transpose(cls, shape):
    stored = randn(*shape)
    grads = gradients_like([stored])
    turned, _ = trajectory(cls, [stored], grads, group={"transposed": True})
    natural, _ = trajectory(cls, [stored.mT.contiguous()], [[g.mT.contiguous()] for (g,) in grads])
    assert_same(turned, [[x.mT] for (x,) in natural])


def test_a_fused_conv1d_moves_as_its_three_projections():
    stored = randn(5, 15)  # Hugging Face's Conv1D: (in, out), q, k and v side by side
    grads = gradients_like([stored])
    one, _ = trajectory(NorMuon, [stored], grads, group={"transposed": True, "split_sizes": [5, 5, 5]})
    apart = [p.mT.contiguous() for p in stored.split(5, dim=1)]
    parts, _ = trajectory(NorMuon, apart, [[p.mT for p in g.split(5, dim=1)] for (g,) in grads])
    assert_same(one, [[torch.cat(p).mT] for p in parts])


def test_adamw_groups_are_torchs_adamw_bit_for_bit():
    shapes = [(9, 4), (4,), (1,), (3, 2, 2)]
    p, q = ([torch.nn.Parameter(randn(*s, seed=i)) for i, s in enumerate(shapes)] for _ in range(2))
    hyper = {"lr": 0.01, "betas": (0.8, 0.97), "eps": 1e-7, "weight_decay": 0.2}
    ours, theirs = Muon([{"params": p, "algorithm": "adamw", **hyper}]), torch.optim.AdamW(q, fused=True, **hyper)
    for step, grads in enumerate(gradients_like(p, steps=8)):
        for a, b, g in zip(p, q, grads, strict=True):
            a.grad = b.grad = None if step < 2 and a.ndim == 1 else g.clone()  # each has its own bias correction
        ours.step()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(p, q, strict=True))


def test_lion_groups_follow_the_papers_rule():
    x, m = randn(6, 4).double(), torch.zeros(6, 4, dtype=torch.float64)
    p = torch.nn.Parameter(x.float())
    optimizer = Muon([{"params": [p], "algorithm": "lion", "lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.3}])
    for (g,) in gradients_like([p], steps=5):
        p.grad = g
        optimizer.step()
        x = x - 0.01 * (torch.sign(0.9 * m + 0.1 * g) + 0.3 * x)
        m = 0.98 * m + 0.02 * g
        torch.testing.assert_close(p.detach().double(), x, atol=1e-6, rtol=0)


@every
@pytest.mark.parametrize("algorithm", ["own", "adamw", "lion"])
def test_cautious_decay_spares_entries_that_the_step_would_let_grow(cls, algorithm):
    # Difference to the run without decay: lr * decay * x where step and weight agree in sign, else nothing.
    x = randn(6, 4)
    group = {} if algorithm == "own" else {"algorithm": algorithm}
    kwargs = {"fraction": 1.0} if cls is Dion2 else {}
    free = trajectory(cls, [x], gradients_like([x], steps=1), group=group, weight_decay=0.0, **kwargs)[0][0][0]
    cautious = trajectory(
        cls, [x], gradients_like([x], steps=1), group=group, weight_decay=0.5, cautious_wd=True, **kwargs
    )[0][0][0]
    shrinks = (x - free) * x >= 0
    torch.testing.assert_close(free - cautious, 0.1 * 0.5 * x * shrinks, atol=1e-6, rtol=0)
    assert 0 < shrinks.sum() < x.numel()


def test_nesterov_looks_one_step_ahead():
    x, grads = randn(6, 4), gradients_like([randn(6, 4)], steps=2)
    moved = trajectory(Muon, [x], grads, nesterov=True, mu=0.5, weight_decay=0.0, newton_schulz_func=exact)[0]
    (g1,), (g2,) = grads
    scale = 0.1 * math.sqrt(6 / 4)
    first = x - scale * exact(1.5 * g1)
    torch.testing.assert_close(moved[0][0], first, atol=ROUND_OFF, rtol=0)
    second = first - scale * exact(0.5 * (0.5 * g1 + g2) + g2)
    torch.testing.assert_close(moved[1][0], second, atol=ROUND_OFF, rtol=0)


# Limits


def test_dion2_on_all_rows_without_decay_of_feedback_accumulates():
    x = randn(6, 4)
    grads = gradients_like([x], steps=4)
    moved, optimizer = trajectory(
        Dion2, [x], grads, fraction=1.0, ef_decay=1.0, weight_decay=0.0, newton_schulz_func=exact
    )
    total = sum(g for (g,) in grads)
    torch.testing.assert_close(optimizer.state.popitem()[1]["momentum"], total, atol=ROUND_OFF, rtol=0)
    step = (moved[-2][0] - moved[-1][0]) / (0.1 * math.sqrt(6 / 4))
    torch.testing.assert_close(step, exact(total), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("shape", "rows"), [((8, 12), True), ((12, 8), False), ((8, 8), True)])
@pytest.mark.parametrize(("fraction", "count"), [(0.25, 2), (0.3, 3), (0.01, 1), (1.0, 8)])
def test_dion2_moves_only_the_lines_where_most_momentum_is(shape, rows, fraction, count):
    x, (grads,) = randn(*shape), gradients_like([randn(*shape)], steps=1)
    ((moved,),), optimizer = trajectory(Dion2, [x], [grads], fraction=fraction, ef_decay=0.5, weight_decay=0.0)
    g = grads[0] if rows else grads[0].mT
    change = (moved - x) if rows else (moved - x).mT
    momentum = optimizer.state.popitem()[1]["momentum"]
    chosen = set(g.abs().sum(1).topk(count).indices.tolist())
    assert {i for i, row in enumerate(change) if row.any()} == chosen
    kept = torch.tensor([[0.5 if i in chosen else 1.0] for i in range(len(g))]) * g
    torch.testing.assert_close(momentum if rows else momentum.mT, kept)


@pytest.mark.parametrize("shape", [(12, 6), (6, 12), (6, 6)])
def test_dion_at_full_rank_tends_to_the_polar_factor(shape):
    u, _, vh = torch.linalg.svd(randn(*shape), full_matrices=False)
    gradient = (u * 0.5 ** torch.arange(6)) @ vh  # well apart, so that the power iteration converges
    momentum, q = torch.zeros(1, *shape), randn(1, 6, 6, seed=1)
    for _ in range(40):
        direction, momentum, q = dion_update(momentum + gradient, q, mu=0.9, epsilon=1e-8)
    torch.testing.assert_close(direction[0], u @ vh, atol=1e-4, rtol=0)


def test_dion_of_low_rank_keeps_what_it_did_not_apply():
    gradient, q = randn(1, 9, 6), randn(1, 6, 2, seed=1)
    direction, momentum, _ = dion_update(gradient, q, mu=0.0, epsilon=1e-8)
    assert torch.linalg.matrix_rank(direction[0]) == 2
    # With mu = 0 all of the approximation is taken out: what stays is orthogonal to the direction's columns.
    torch.testing.assert_close(direction[0].mT @ momentum[0], torch.zeros(6, 6), atol=ROUND_OFF, rtol=0)


def test_more_power_iterations_come_closer_to_the_best_low_rank_direction():
    u, s, vh = torch.linalg.svd(randn(1, 12, 8), full_matrices=False)
    best = u[..., :2] @ vh[:, :2]
    gradient = (u * s.square()[:, None, :]) @ vh
    q = randn(1, 8, 2, seed=1)
    errors = [(dion_update(gradient, q, mu=0.95, epsilon=1e-8, power_iters=k)[0] - best).norm() for k in (1, 4, 16)]
    assert errors[0] > errors[1] > errors[2]


def test_normuon_keeps_muons_norm_and_evens_out_its_rows():
    muons = randn(2, 8, 20) * torch.logspace(-2, 1, 8)[:, None]
    direction, variance = normuon_update(muons, torch.zeros(2, 8, 1), muon_beta2=0.9)
    torch.testing.assert_close(direction.flatten(1).norm(dim=1), muons.flatten(1).norm(dim=1))
    torch.testing.assert_close(variance, 0.1 * muons.square().mean(-1, keepdim=True))
    rows = direction.norm(dim=-1)
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows), rtol=1e-4, atol=0)
