"""State of the Dion family: there from construction, exact across a save and a load, and nothing outside of it."""

import copy
import io

import pytest
import torch

from sandbox.optim import Dion, Dion2, Muon, NorMuon

ALL = (Muon, NorMuon, Dion2, Dion)
every = pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
OWN = {Muon: {}, NorMuon: {"variance_neuron": (6, 1)}, Dion2: {}, Dion: {"Q": (4, 4)}}  # of a (6, 4) matrix


def fresh(cls, *, dtype=torch.float32, **kwargs):
    """Return parameters and an optimizer with a matrix group, an AdamW and a Lion group, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (6, 4), "k": (6, 4), "up": (3, 7), "embed": (9, 4), "gain": (4,), "head": (9, 4)}
    p = {n: torch.nn.Parameter(torch.randn(*s, generator=generator).to(dtype)) for n, s in shapes.items()}
    groups = [
        {"params": [p["q"], p["k"], p["up"]]},
        {"params": [p["embed"], p["gain"]], "algorithm": "adamw", "lr": 0.003, "weight_decay": 0.1},
        {"params": [p["head"]], "algorithm": "lion", "lr": 0.001, "betas": (0.9, 0.99)},
    ]
    return p, cls(groups, lr=0.02, **kwargs)


def run(parameters, optimizer, steps, *, without=()):
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for name, p in parameters.items():
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if name in without else grad
        optimizer.step()


@every
def test_state_exists_from_construction_under_upstreams_names(cls):
    p, optimizer = fresh(cls)
    shapes = {name: {k: tuple(t.shape) for k, t in optimizer.state[x].items()} for name, x in p.items()}
    assert shapes["q"] == {"momentum": (6, 4), **OWN[cls]}
    assert shapes["embed"] == {"momentum": (9, 4), "variance": (9, 4), "step_dev": ()}
    assert shapes["head"] == {"momentum": (9, 4)}
    run(p, optimizer, range(2))
    assert shapes == {name: {k: tuple(t.shape) for k, t in optimizer.state[x].items()} for name, x in p.items()}


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_resumed_is_straight_bit_for_bit(cls, dtype, by_keyword):
    p, straight = fresh(cls, dtype=dtype)
    run(p, straight, range(6))
    half, optimizer = fresh(cls, dtype=dtype)
    run(half, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"p": [x.data for x in half.values()], "o": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    rest, resumed = fresh(cls, dtype=dtype)
    for x, value in zip(rest.values(), saved["p"], strict=True):
        x.data.copy_(value)
    resumed.load_state_dict(state_dict=saved["o"]) if by_keyword else resumed.load_state_dict(saved["o"])
    run(rest, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(p.values(), rest.values(), strict=True))


def test_bfloat16_parameters_count_steps_beyond_256():
    p, optimizer = fresh(Muon, dtype=torch.bfloat16)
    optimizer.state[p["gain"]]["step_dev"].fill_(1001)
    _, other = fresh(Muon, dtype=torch.bfloat16)
    other.load_state_dict(optimizer.state_dict())
    count = other.state[other.param_groups[1]["params"][1]]["step_dev"]
    assert (count.dtype, count.item()) == (torch.float32, 1001)


@every
def test_one_state_dict_loads_into_two_optimizers_that_then_part(cls):
    p, optimizer = fresh(cls)
    run(p, optimizer, range(2))
    saved = optimizer.state_dict()
    (a, first), (_, second) = fresh(cls), fresh(cls)
    first.load_state_dict(saved)
    second.load_state_dict(saved)
    run(a, first, range(2, 4))
    q = second.param_groups[0]["params"][0]
    assert torch.equal(second.state[q]["momentum"], optimizer.state[p["q"]]["momentum"])
    assert not torch.equal(second.state[q]["momentum"], first.state[a["q"]]["momentum"])


@every
def test_a_state_of_other_shapes_or_rules_is_refused_before_anything_changes(cls):
    p, optimizer = fresh(cls)
    run(p, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["state"][0]["momentum"] = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=r"momentum.*\(4, 6\) in the state, \(6, 4\) here"):
        optimizer.load_state_dict(wrong)
    swapped = copy.deepcopy(before)
    swapped["param_groups"][1]["algorithm"] = "lion"
    with pytest.raises(ValueError, match="'lion' in the state, 'adamw' here"):
        optimizer.load_state_dict(swapped)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(t, after["state"][i][k]) for i, s in before["state"].items() for k, t in s.items())


@every
def test_a_state_without_our_own_options_loads(cls):
    p, optimizer = fresh(cls, cautious_wd=True)
    run(p, optimizer, range(1))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group.pop("cautious_wd")
    other, loaded = fresh(cls, cautious_wd=True)
    loaded.load_state_dict(saved)
    assert all(group["cautious_wd"] for group in loaded.param_groups)
    run(other, loaded, range(1, 2))


@every
def test_parameters_without_gradient_wait_and_then_start_as_new_ones(cls):
    p, optimizer = fresh(cls)
    before = {name: x.detach().clone() for name, x in p.items()}
    absent = ("k", "gain", "head")
    run(p, optimizer, range(2), without=absent)
    assert all(torch.equal(p[name], before[name]) for name in absent)
    run(p, optimizer, range(2, 3))
    late, expected = fresh(cls)
    run(late, expected, range(2, 3))
    assert all(torch.equal(p[name], late[name]) for name in ("gain", "head"))
    torch.testing.assert_close(p["k"], late["k"])  # its batch has another size


@every
def test_a_group_can_be_added_later(cls):
    p, optimizer = fresh(cls)
    run(p, optimizer, range(1))
    p["new"] = torch.nn.Parameter(torch.zeros(5, 4))
    optimizer.add_param_group({"params": p["new"], "lr": 0.1})
    assert "momentum" in optimizer.state[p["new"]]
    run(p, optimizer, range(1, 2))
    assert p["new"].abs().sum() > 0


@every
def test_a_copy_goes_on_like_the_original(cls):
    p, optimizer = fresh(cls)
    run(p, optimizer, range(1))
    other, twin = copy.deepcopy((p, optimizer))
    run(p, optimizer, range(1, 3))
    run(other, twin, range(1, 3))
    assert all(torch.equal(a, b) for a, b in zip(p.values(), other.values(), strict=True))


@every
def test_equal_inputs_give_equal_bits(cls):
    (a, first), (b, second) = fresh(cls), fresh(cls)
    run(a, first, range(3))
    run(b, second, range(3))
    assert all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


@every
def test_nothing_global_is_touched(cls):
    def switches():
        return (
            torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(), torch.compiler.is_compiling(),
        )  # fmt: skip

    before = switches()
    p, optimizer = fresh(cls)
    run(p, optimizer, range(2))
    assert switches() == before


def test_dions_first_q_depends_on_seed_and_place_only():
    (_, a), (_, b), (q, c) = fresh(Dion), fresh(Dion), fresh(Dion, seed=1)
    first = [a.state[x]["Q"] for x in a.param_groups[0]["params"]]
    assert all(torch.equal(x, b.state[y]["Q"]) for x, y in zip(first, b.param_groups[0]["params"], strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], c.state[q["q"]]["Q"])


@every
def test_memory_is_one_buffer_a_matrix_and_does_not_grow(cls):
    def held(optimizer, p):
        return sum(t.numel() for t in optimizer.state[p].values())

    p, optimizer = fresh(cls)
    own = {Muon: 0, NorMuon: 6, Dion2: 0, Dion: 16}[cls]
    assert held(optimizer, p["q"]) == 24 + own
    run(p, optimizer, range(3))
    assert held(optimizer, p["q"]) == 24 + own
    assert len(optimizer.state) == len(p)
