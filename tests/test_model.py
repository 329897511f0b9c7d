"""The GPT: causal, counted, started near the uniform distribution, drawn from a private generator."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from sandbox.config import ModelConfig
from sandbox.model import GPT, next_token_loss, parameter_count, rotary, rotate

SMALL = ModelConfig(vocab_size=50, width=16, depth=2, heads=2, context=12)
VARIANTS = {
    "plain": SMALL,
    "tied": replace(SMALL, tied=True),
    "learned": replace(SMALL, positions="learned"),
    "bias": replace(SMALL, bias=True),
    "all": replace(SMALL, tied=True, positions="learned", bias=True, mlp_ratio=3),
}


def ids(config, *, seed=0, batch=3):
    return torch.randint(config.vocab_size, (batch, config.context), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_logit_depends_on_no_later_token(config):
    model, x_BT = GPT(config), ids(config)
    later = x_BT.clone()
    later[:, 7:] = (later[:, 7:] + 1) % config.vocab_size
    before, after = model(x_BT), model(later)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_parameters_are_as_many_as_the_formula_says(config):
    assert sum(p.numel() for p in GPT(config, device="meta").parameters()) == parameter_count(config)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_first_loss_is_that_of_the_uniform_distribution(config):
    x_BT = ids(config, batch=32)
    loss = next_token_loss(GPT(config), x_BT, x_BT.roll(-1, 1))
    assert loss.item() == pytest.approx(math.log(config.vocab_size), abs=0.05)


def test_a_tied_head_is_the_embedding_also_in_a_copy():
    model = GPT(replace(SMALL, tied=True))
    assert model.lm_head.weight is model.embed.weight
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.embed.weight


def test_a_seed_gives_one_model_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    first, second, other = GPT(SMALL, seed=1), GPT(SMALL, seed=1), GPT(SMALL, seed=2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_initial_scales_are_those_of_the_config():
    model = GPT(ModelConfig(width=256, embed_std=0.5, matrix_std=2.0, head_std=0.0, depth=1))
    assert model.embed.weight.std().item() == pytest.approx(0.5, rel=0.02)
    assert model.blocks[0].attn.q.weight.std().item() == pytest.approx(2 / 16, rel=0.02)
    assert model.blocks[0].attn.o.weight.std().item() == pytest.approx(2 / 16 / math.sqrt(2), rel=0.02)
    assert not model.lm_head.weight.any()


def test_rotated_queries_and_keys_meet_by_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    cos_TK, sin_TK = rotary(20, 8, torch.device("cpu"))

    def product(i, j):
        return float(
            (rotate(q, cos_TK[i : i + 1], sin_TK[i : i + 1]) * rotate(k, cos_TK[j : j + 1], sin_TK[j : j + 1])).sum()
        )

    assert product(3, 1) == pytest.approx(product(17, 15), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)


def test_too_many_tokens_for_learned_positions_are_refused():
    model = GPT(replace(SMALL, positions="learned"))
    with pytest.raises(ValueError, match="13 tokens were given; allowed are the 12"):
        model(torch.zeros(1, 13, dtype=torch.long))


def test_every_parameter_gets_a_gradient():
    model, x_BT = GPT(VARIANTS["bias"]), ids(SMALL)
    next_token_loss(model, x_BT, x_BT).backward()
    assert all(p.grad is not None for p in model.parameters())
