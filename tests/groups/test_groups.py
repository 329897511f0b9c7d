"""One explicit group a role: rates, overrides and refusals, and the table that shows them. PITFALLS 3, 5, 8 to 11."""

import json
import math

import pytest
import torch
from torch import nn

from sandbox.config import (
    AdamWConfig,
    Dion2Config,
    DionConfig,
    GroupPolicy,
    ModelConfig,
    MuonConfig,
    NorMuonConfig,
    Override,
)
from sandbox.groups.rates import config_rates, role_rates
from sandbox.groups.roles import decide_roles
from sandbox.groups.separate import check_complete, make_groups, role_groups
from sandbox.groups.table import COLUMNS, brief, group_table
from sandbox.model import GPT

WIDTH, VOCABULARY = 16, 64
CONFIGS = (MuonConfig, NorMuonConfig, Dion2Config, DionConfig)


def gpt(**options):
    return GPT(ModelConfig(vocab_size=VOCABULARY, width=WIDTH, context=32, **options))


def groups_of(model, policy=GroupPolicy(), **rates):  # noqa: B008
    rates = {"base_lr": 0.02, "scalar_opt": "adamw", "weight_decay": 0.1, **rates}
    return role_groups(model, role_rates(**rates), policy, stored="rate")


def by_role(groups):
    return {group["role"]: group for group in groups}


def with_overrides(*overrides):
    return GroupPolicy(overrides=tuple(Override(**override) for override in overrides))


# --- Rates --------------------------------------------------------------------------------------------------------


def test_groups_come_in_the_references_order_with_its_keys():
    groups = groups_of(gpt(), scalar_betas=(0.8, 0.9), scalar_eps=1e-6)
    assert [group["role"] for group in groups] == ["matrix", "vector", "embed", "lm_head"]
    assert groups[0].keys() == {"params", "role", "param_names", "reason"}
    for group in groups[1:]:
        assert group.keys() == groups[0].keys() | {"algorithm", "lr", "weight_decay", "beta1", "beta2", "epsilon"}
        assert (group["algorithm"], group["beta1"], group["beta2"], group["epsilon"]) == ("adamw", 0.8, 0.9, 1e-6)


def test_without_betas_and_epsilon_the_optimizers_own_count():
    assert groups_of(gpt())[1].keys() == {"params", "role", "algorithm", "lr", "weight_decay", "param_names", "reason"}


@pytest.mark.parametrize(
    ("given", "vector", "embed", "lm_head"),
    [
        ({}, 0.02, 0.02, 0.005),
        ({"scalar_lr": 0.003}, 0.003, 0.003, 0.005),
        ({"embed_lr": 0.01}, 0.02, 0.01, 0.005),
        ({"scalar_lr": 0.003, "embed_lr": 0.01, "lm_head_lr": 0.004}, 0.003, 0.01, 0.004),
        ({"scalar_lr": 0.0}, 0.0, 0.0, 0.005),
        ({"embed_lr": 0.0}, 0.02, 0.0, 0.005),
        ({"lm_head_lr": 0.0}, 0.02, 0.02, 0.0),
    ],
)
def test_each_role_has_its_own_rate_and_zero_is_one(given, vector, embed, lm_head):
    groups = by_role(groups_of(gpt(), **given))
    assert (groups["vector"]["lr"], groups["embed"]["lr"], groups["lm_head"]["lr"]) == (vector, embed, lm_head)


def test_only_vectors_decay_besides_the_matrices():
    groups = by_role(groups_of(gpt()))
    assert [groups[role]["weight_decay"] for role in ("vector", "embed", "lm_head")] == [0.1, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rule", "algorithm", "rate"),
    [
        ("reference", "adamw", 0.02 / math.sqrt(WIDTH)),
        ("reference", "lion", 0.02 / math.sqrt(WIDTH)),
        ("upstream", "adamw", 0.02),
        ("upstream", "lion", 0.02 / math.sqrt(WIDTH)),
    ],
)
def test_the_heads_rate_follows_the_rule(rule, algorithm, rate):
    groups = by_role(groups_of(gpt(), GroupPolicy(lm_head_rule=rule), scalar_opt=algorithm))
    assert groups["lm_head"]["lr"] == rate
    assert groups["lm_head"]["algorithm"] == algorithm


def test_heads_of_different_widths_have_rates_of_their_own():
    model = gpt()
    model.lm_heads = nn.ModuleList([nn.Linear(4, VOCABULARY, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=False)])
    groups = groups_of(model)
    assert [group["role"] for group in groups] == ["matrix", "vector", "embed", "lm_head", "lm_head"]
    assert [group["lr"] for group in groups[3:]] == [0.02 / math.sqrt(WIDTH), 0.02 / math.sqrt(4)]
    assert [len(group["params"]) for group in groups[3:]] == [2, 1]


@pytest.mark.parametrize("betas", [(0.8,), 0.9, "no", (0.8, 0.9, 0.99)])
def test_betas_that_are_not_two_numbers_are_refused(betas):
    with pytest.raises(ValueError, match="scalar_betas"):
        role_rates(0.02, "adamw", 0.0, betas)


@pytest.mark.parametrize("algorithm", ["sgd", "AdamW", None])
def test_an_unknown_scalar_algorithm_is_refused(algorithm):
    with pytest.raises(ValueError, match=r"scalar_opt=.*'adamw' or 'lion'"):
        role_rates(0.02, algorithm, 0.0)


@pytest.mark.parametrize(("frozen", "why"), [(False, "tied"), (True, "frozen")])
def test_a_heads_rate_without_a_head_to_move_is_refused(frozen, why):
    model = gpt(tied=not frozen)
    if frozen:
        model.lm_head.requires_grad_(False)
    with pytest.raises(ValueError, match=rf"lm_head_lr=0.004.*{why}"):
        groups_of(model, lm_head_lr=0.004)


# --- Completeness -------------------------------------------------------------------------------------------------


def test_a_tied_table_is_counted_once():
    groups = groups_of(gpt(tied=True))
    assert [group["role"] for group in groups] == ["matrix", "vector", "embed"]
    assert sum(p.numel() for g in groups for p in g["params"]) == sum(p.numel() for p in gpt(tied=True).parameters())


def test_matrix_vector_and_embed_are_there_even_when_empty():
    groups = groups_of(nn.LayerNorm(WIDTH))
    assert [(group["role"], len(group["params"])) for group in groups] == [("matrix", 0), ("vector", 2), ("embed", 0)]


def test_frozen_matrices_are_in_no_group_and_said_so():
    model = gpt()
    model.blocks.requires_grad_(False)
    with pytest.warns(UserWarning, match="all 12 matrices are frozen"):
        groups = groups_of(model)
    assert [len(group["params"]) for group in groups] == [0, 1, 1, 1]


def test_some_frozen_matrices_are_nothing_to_warn_of():
    model = gpt()
    model.blocks[0].requires_grad_(False)
    assert len(groups_of(model)[0]["params"]) == 6


def test_frozen_base_with_adapters_is_nothing_to_warn_of():
    model = gpt().requires_grad_(False)
    model.blocks[0].attn.lora_A = nn.Linear(WIDTH, 2, bias=False)
    assert [len(group["params"]) for group in groups_of(model)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda groups, model: groups[0]["params"].pop(), r"in no group: blocks\.1\.mlp\.down\.weight"),
        (lambda groups, model: groups[1]["params"].append(groups[2]["params"][0]), r"in two groups: embed\.weight"),
        (lambda groups, model: groups[1]["params"].append(nn.Parameter(torch.zeros(1))), "1 of 20 .* not the model's"),
        (lambda groups, model: setattr(model, "extra", nn.Parameter(torch.zeros(1))), "in no group: extra"),
    ],
)
def test_groups_that_are_not_the_models_parameters_once_each_are_refused(spoil, why):
    model = gpt()
    groups = groups_of(model)
    check_complete(model, groups)
    spoil(groups, model)
    with pytest.raises(ValueError, match=why):
        check_complete(model, groups)


# --- Overrides ----------------------------------------------------------------------------------------------------


def test_an_override_moves_a_parameter_to_another_role():
    policy = with_overrides({"pattern": r"blocks\.0\.attn\.q\.weight", "role": "vector"})
    groups = by_role(groups_of(gpt(), policy, scalar_lr=0.003))
    assert "blocks.0.attn.q.weight" in groups["vector"]["param_names"]
    assert "blocks.0.attn.q.weight" not in groups["matrix"]["param_names"]


def test_an_override_with_a_rate_makes_a_group_of_its_own():
    policy = with_overrides(
        {"pattern": r".*\.o\.weight", "role": "vector", "lr": 0.0, "weight_decay": 0.5, "algorithm": "lion"}
    )
    *_, group = groups_of(gpt(), policy)
    assert (group["role"], group["algorithm"], group["lr"], group["weight_decay"]) == ("vector", "lion", 0.0, 0.5)
    assert group["param_names"] == ["blocks.0.attn.o.weight", "blocks.1.attn.o.weight"]


def test_a_matrix_moved_off_the_orthogonal_optimizer_shows_its_rate_and_decay_in_the_table():
    policy = with_overrides({"pattern": r".*\.o\.weight", "role": "matrix", "algorithm": "adamw", "lr": 0.001})
    config = MuonConfig(lr=0.02, weight_decay=0.1, policy=policy)
    row = group_table(config.build(gpt()), config).iloc[1]  # beside the other matrices
    assert (row["role"], row["algorithm"], row["lr"], row["weight_decay"]) == ("matrix", "adamw", 0.001, 0.1)
    assert row["names"] == "blocks.0.attn.o.weight, blocks.1.attn.o.weight"
    assert row["reason"].startswith("override")


def test_a_matrix_moved_off_the_orthogonal_optimizer_without_a_rate_is_refused():
    policy = with_overrides({"pattern": r".*\.o\.weight", "role": "matrix", "algorithm": "adamw"})
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.o\.weight.*without a rate"):
        groups_of(gpt(), policy)


def test_a_matrix_can_keep_the_orthogonal_optimizer_with_a_rate_of_its_own():
    policy = with_overrides({"pattern": r".*\.mlp\..*", "role": "matrix", "lr": 0.01})
    *_, group = groups_of(gpt(), policy)
    assert (group["lr"], "algorithm" in group, len(group["params"])) == (0.01, False, 4)


def test_a_pattern_matches_the_whole_name():
    with pytest.raises(ValueError, match="matches no parameter"):
        groups_of(gpt(), with_overrides({"pattern": "blocks", "role": "vector"}))


def test_a_pattern_without_a_match_is_refused_with_near_names():
    policy = with_overrides({"pattern": "blocks.0.attn.qq.weight", "role": "vector"})
    with pytest.raises(ValueError, match=r"did you mean.*'blocks\.0\.attn\.q\.weight'"):
        groups_of(gpt(), policy)


def test_a_pattern_that_matches_only_frozen_parameters_is_refused():
    model = gpt()
    model.blocks[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"frozen parameters only: blocks\.0\.attn\.q\.weight"):
        groups_of(model, with_overrides({"pattern": r"blocks\.0\.attn\.q\.weight", "role": "vector"}))


def test_two_claims_on_one_parameter_are_refused():
    policy = with_overrides(
        {"pattern": r"blocks\.0\..*", "role": "vector"}, {"pattern": r".*\.q\.weight", "role": "embed"}
    )
    with pytest.raises(ValueError, match=r"two overrides claim 'blocks\.0\.attn\.q\.weight'"):
        groups_of(gpt(), policy)


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ValueError, match="no regular expression"):
        groups_of(gpt(), with_overrides({"pattern": "blocks.(", "role": "vector"}))


def is_square(name, parameter):
    return parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1]


def test_a_predicate_by_importable_name_claims_parameters():
    policy = with_overrides({"pattern": f"{__name__}:is_square", "role": "vector", "lr": 0.001})
    *_, group = groups_of(gpt(), policy)
    assert len(group["params"]) == 8  # q, k, v, o of two blocks


def test_a_predicate_that_cannot_be_imported_is_refused():
    with pytest.raises(ValueError, match=r"predicate.*cannot be imported"):
        groups_of(gpt(), with_overrides({"pattern": "nowhere:at_all", "role": "vector"}))


def test_a_vector_cannot_become_a_matrix():
    with pytest.raises(ValueError, match=r"'norm\.weight'.*fewer than two dimensions"):
        groups_of(gpt(), with_overrides({"pattern": r"norm\.weight", "role": "matrix"}))


def test_a_tied_parameter_answers_to_both_its_names():
    policy = with_overrides({"pattern": r"lm_head\.weight", "role": "embed", "lr": 0.001})
    *_, group = groups_of(gpt(tied=True), policy)
    assert (group["param_names"], group["lr"]) == (["embed.weight"], 0.001)


def test_a_policy_survives_json():
    policy = with_overrides({"pattern": r".*\.o\.weight", "role": "vector", "lr": 0.0, "algorithm": "lion"})
    assert GroupPolicy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


# --- Matrices stored otherwise ------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """As transformers' layer of this name: y = x W + b with W (in, out)."""

    def __init__(self, fan_out, fan_in):
        super().__init__()
        self.nf, self.nx = fan_out, fan_in
        self.weight = nn.Parameter(torch.randn(fan_in, fan_out, generator=torch.Generator().manual_seed(0)))


def pair():
    """Return the same weights stored (in, out) and (out, in)."""
    stored = nn.ModuleDict({"up": Conv1D(32, 8), "down": Conv1D(8, 32), "square": Conv1D(8, 8)})
    plain = nn.ModuleDict({name: nn.Linear(layer.nx, layer.nf, bias=False) for name, layer in stored.items()})
    for name, layer in stored.items():
        plain[name].weight.data = layer.weight.data.T.clone()
    return stored, plain


@pytest.mark.parametrize(
    "config", [config(lr=0.1, weight_decay=0.3) for config in CONFIGS], ids=lambda c: type(c).__name__
)
def test_a_layer_stored_in_out_moves_as_the_same_layer_stored_out_in(config):
    stored, plain = pair()
    optimizers = [config.build(stored), config.build(plain)]
    for step in range(3):
        for name in stored:
            shape, generator = plain[name].weight.shape, torch.Generator().manual_seed(step)
            plain[name].weight.grad = torch.randn(shape, generator=generator)
            stored[name].weight.grad = plain[name].weight.grad.T.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    for name in stored:
        torch.testing.assert_close(stored[name].weight.T, plain[name].weight, atol=1e-5, rtol=1e-5)  # round-off


def test_without_the_key_a_rate_makes_good_for_the_inverted_scale():
    decisions, _ = decide_roles(pair()[0])
    groups = make_groups(decisions, role_rates(0.1, "adamw", 0.3), GroupPolicy(), stored="rate")
    found = {name: (g.get("lr"), g.get("weight_decay")) for g in groups for name in g["param_names"]}
    assert found["square.weight"] == (None, None)
    for name, ratio in (("up", 4.0), ("down", 0.25)):
        lr, decay = found[f"{name}.weight"]
        assert lr == pytest.approx(0.1 * ratio)
        assert lr * decay == pytest.approx(0.1 * 0.3)  # what decays stays


def test_a_slice_of_stacked_experts_moves_as_a_separate_matrix_would():
    model, plain = nn.Module(), nn.ModuleList(nn.Linear(8, 6, bias=False) for _ in range(3))
    model.experts = nn.Parameter(torch.stack([layer.weight.detach() for layer in plain]))
    gradient = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))
    model.experts.grad = gradient.clone()
    for layer, slice_ in zip(plain, gradient, strict=True):
        layer.weight.grad = slice_.clone()
    for part, policy in ((model, GroupPolicy(experts="batched")), (plain, GroupPolicy())):
        MuonConfig(lr=0.1, policy=policy).build(part).step()
    together = torch.stack([layer.weight.detach() for layer in plain])
    torch.testing.assert_close(model.experts.detach(), together, atol=1e-6, rtol=1e-6)  # float32 round-off


def test_a_convolution_taken_as_a_matrix_moves_as_its_flattened_self():
    model, plain = nn.ModuleList([nn.Conv1d(4, 6, 2, bias=False)]), nn.ModuleList([nn.Linear(8, 6, bias=False)])
    plain[0].weight.data = model[0].weight.detach().flatten(1).clone()
    gradient = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    model[0].weight.grad, plain[0].weight.grad = gradient.view(6, 4, 2).clone(), gradient.clone()
    for part in (model, plain):
        MuonConfig(lr=0.1, policy=GroupPolicy(convolutions="flatten")).build(part).step()
    torch.testing.assert_close(model[0].weight.flatten(1), plain[0].weight, atol=1e-6, rtol=1e-6)  # float32 round-off


# --- The table ----------------------------------------------------------------------------------------------------


def test_the_table_of_a_model_and_of_its_optimizer_agree():
    config = MuonConfig(lr=0.02, embed_lr=0.01, lm_head_lr=0.003, scalar_lr=0.004, weight_decay=0.1)
    model = gpt(depth=6)
    of_model, of_optimizer = group_table(model, config), group_table(config.build(model))
    assert list(of_model.columns) == list(COLUMNS)
    assert of_model.equals(of_optimizer)
    assert list(of_model["lr"]) == [0.02, 0.004, 0.01, 0.003]
    assert list(of_model["weight_decay"]) == [0.1, 0.1, 0.0, 0.0]
    assert of_model["elements"].sum() == sum(p.numel() for p in model.parameters())
    assert of_model["share"].sum() == pytest.approx(1.0)


def test_rows_are_plain_json_values():
    for source in (MuonConfig().build(gpt(depth=6)), torch.optim.SGD(gpt().parameters(), lr=torch.tensor(0.1))):
        rows = group_table(source).to_dict("records")
        assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_rates_in_the_table_are_those_before_the_schedule():
    optimizer = MuonConfig(lr=0.02).build(gpt())
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    assert group_table(optimizer)["lr"][0] == 0.02


def test_the_table_of_a_foreign_optimizer_says_what_there_is():
    table = group_table(torch.optim.AdamW(gpt().parameters(), lr=0.1))
    assert (table["role"][0], table["algorithm"][0], table["lr"][0], table["names"][0]) == (None, "adamw", 0.1, "")


def test_the_table_of_a_bare_model_has_roles_and_no_rates():
    table = group_table(gpt(depth=6))
    assert list(table["role"]) == ["matrix", "vector", "embed", "lm_head"]
    assert table["lr"].isna().all()


def test_the_table_of_the_contracts_groups_takes_the_matrices_rate_from_the_config():
    config = MuonConfig(lr=0.02)
    groups = [{k: v for k, v in g.items() if k != "lr" or g["role"] != "matrix"} for g in groups_of(gpt())]
    assert group_table(groups, config)["lr"][0] == 0.02


def test_a_model_of_mostly_tables_is_warned_of():
    with pytest.warns(UserWarning, match=r"only \d+% of the [\d,]+ elements"):
        group_table(GPT(ModelConfig(vocab_size=1024, width=8, depth=1, heads=2)), MuonConfig())


def test_a_share_of_the_baselines_matrices_is_nothing_to_warn_of():
    group_table(GPT(ModelConfig(vocab_size=1024, width=8, depth=1, heads=2)), AdamWConfig())


def test_rows_come_by_role_also_where_every_matrix_is_stored_otherwise():
    model = nn.ModuleDict({"embed": nn.Embedding(9, 8), "norm": nn.LayerNorm(8), "up": Conv1D(32, 8)})
    optimizer = MuonConfig().build(model)
    assert [group["role"] for group in optimizer.param_groups] == ["matrix", "vector", "embed"]
    assert group_table(model, MuonConfig()).equals(group_table(optimizer))


def test_an_unsure_reason_is_marked():
    model = gpt(depth=6)
    model.thing = nn.Parameter(torch.zeros(6, 7))
    with pytest.warns(UserWarning, match="thing"):
        table = group_table(model, MuonConfig())
    assert "nothing says more (?)" in table["reason"][0]


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ([], ""),
        (["a", "b.0"], "a, b.0"),
        ([f"blocks.{i}.q" for i in range(12)], "blocks.0-11.q"),
        ([f"b.{i}.e.{j}.w" for i in range(3) for j in range(4)] + ["norm2.w"], "b.0-2.e.0-3.w, norm2.w"),
        ([f"b.{2 * i}.w" for i in range(7)], "b.0|2|4|6|8|10|12.w"),
    ],
)
def test_names_stay_in_one_line(names, line):
    assert brief(names) == line


@pytest.mark.parametrize("config", [*CONFIGS, AdamWConfig])
def test_every_config_has_its_rates_read_alike(config):
    rates = config_rates(config(lr=0.02, scalar_lr=0.003, embed_lr=0.01, lm_head_lr=0.004, weight_decay=0.1))
    assert (rates.base, rates.vector, rates.embed, rates.lm_head, rates.decay) == (0.02, 0.003, 0.01, 0.004, 0.1)
