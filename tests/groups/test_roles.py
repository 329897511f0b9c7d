"""Every parameter has one role, for a reason: PITFALLS 1, 2, 4 to 9, properties, and real architectures."""

import copy
import warnings

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from sandbox.config import GroupPolicy, ModelConfig, Override
from sandbox.groups.roles import explain_roles, param_roles
from sandbox.model import GPT

VOCABULARY, WIDTH = 40, 8


def compiled(model):
    return torch.compile(model, backend="eager")  # inductor's import takes seconds


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o_proj, self.output_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, VOCABULARY)})


class Tiny(nn.Module):
    """A language model whose head has the given name; ``tied`` shares its table, ``first`` registers the head first."""

    def __init__(self, head="lm_head", *, tied=False, first=False, embed="embed"):
        super().__init__()
        parts = [
            (embed, nn.Embedding(VOCABULARY, WIDTH)),
            ("blocks", nn.ModuleList(nn.ModuleDict({"attn": Attention(), "norm": nn.LayerNorm(WIDTH)}) for _ in "12")),
            (head, nn.Linear(WIDTH, VOCABULARY, bias=False)),
        ]
        if tied:
            parts[2][1].weight = parts[0][1].weight
        for name, part in reversed(parts) if first else parts:
            self.add_module(name, part)


@pytest.mark.parametrize("name", ["lm_head", "embed_out", "output", "unembed", "head", "decoder", "to_logits", "fc"])
@pytest.mark.parametrize("first", [False, True])
def test_a_head_is_a_head_whatever_its_name(name, first):
    roles = param_roles(Tiny(name, first=first))
    assert roles[f"{name}.weight"] == "lm_head"
    assert list(roles.values()).count("lm_head") == 1


@pytest.mark.parametrize("part", ["q", "o_proj", "output_proj", "output.dense", "output.head"])
def test_what_only_sounds_like_a_head_inside_a_block_is_a_matrix(part):
    assert param_roles(Tiny())[f"blocks.0.attn.{part}.weight"] == "matrix"


def test_only_the_layer_that_makes_logits_is_the_head_not_all_inside_a_module_of_that_name():
    model = Tiny("body")
    model.lm_head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    del model.body
    model.lm_head = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH), "decoder": nn.Linear(WIDTH, VOCABULARY)})
    roles = param_roles(model)
    assert (roles["lm_head.dense.weight"], roles["lm_head.decoder.weight"]) == ("matrix", "lm_head")


def test_several_heads_in_a_list_are_heads():
    model = Tiny()
    model.lm_head = None
    model.lm_heads = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(3))
    roles = param_roles(model)
    assert [name for name, role in roles.items() if role == "lm_head"] == [f"lm_heads.{i}.weight" for i in range(3)]


def test_a_head_padded_beyond_the_vocabulary_is_still_one():
    model = Tiny("head")
    model.head = nn.Linear(WIDTH, 64, bias=False)
    assert param_roles(model)["head.weight"] == "lm_head"


def test_a_layer_named_head_that_makes_no_logits_is_a_matrix():
    model = Tiny("lm_head")
    model.head = nn.Linear(WIDTH, WIDTH)
    assert param_roles(model)["head.weight"] == "matrix"


def test_a_head_stored_as_a_bare_parameter_is_a_head_in_either_orientation():
    model = Tiny("body")
    del model.body
    model.unembed = nn.Parameter(torch.zeros(WIDTH, VOCABULARY))
    assert param_roles(model)["unembed"] == "lm_head"


def test_the_bias_of_a_head_is_a_vector():
    model = Tiny()
    model.lm_head = nn.Linear(WIDTH, VOCABULARY)
    assert param_roles(model)["lm_head.bias"] == "vector"


def test_hugging_face_accessors_outrank_names():
    model = Tiny("head")
    model.body = nn.Linear(WIDTH, VOCABULARY, bias=False)
    type(model).get_output_embeddings = lambda self: self.body
    try:
        roles = param_roles(model)
    finally:
        del type(model).get_output_embeddings
    assert (roles["body.weight"], roles["head.weight"]) == ("lm_head", "matrix")


@pytest.mark.parametrize("first", [False, True])
def test_a_tied_table_is_one_embedding_in_either_order(first):
    roles = param_roles(Tiny("head", tied=True, first=first))
    name = "head.weight" if first else "embed.weight"
    assert roles[name] == "embed"
    assert list(roles.values()).count("embed") == 1
    assert "lm_head" not in roles.values()


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("pos_emb", (16, WIDTH), "embed"),
        ("cls", (1, WIDTH), "embed"),
        ("wte", (VOCABULARY, WIDTH), "embed"),
        ("position_embeddings", (1, 16, WIDTH), "embed"),
        ("relative_position_bias_table", (9, 4), "embed"),
        ("pos_w", (16, WIDTH), "embed"),
        ("table", (VOCABULARY, WIDTH), "embed"),
        ("row", (1, WIDTH), "vector"),
        ("column", (WIDTH, 1), "vector"),
        ("pos_bias_u", (4, WIDTH), "vector"),
        ("gate_up_proj_bias", (4, WIDTH), "vector"),
        ("A_log", (WIDTH, 4), "vector"),
        ("layer_scale", (1, WIDTH, 1), "vector"),
        ("gain", (WIDTH, 1, 1), "vector"),
        ("w_stack", (3, WIDTH, WIDTH), "vector"),
        ("text_projection", (WIDTH, WIDTH), "matrix"),
        ("token_proj_weight", (WIDTH, WIDTH), "matrix"),
        ("temperature", (), "vector"),
    ],
)
def test_a_bare_parameter_has_the_role_that_its_name_and_shape_tell(name, shape, role):
    model = Tiny()
    model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    assert param_roles(model)[name] == role


def test_a_bare_parameter_with_the_embeddings_rows_is_a_table():
    model = Tiny()
    model.extra = nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
    assert param_roles(model)["extra"] == "embed"


def test_an_ambiguous_parameter_is_a_matrix_and_is_named_in_one_warning():
    model = Tiny()
    model.thing, model.other = nn.Parameter(torch.zeros(6, WIDTH)), nn.Parameter(torch.zeros(6, WIDTH))
    with pytest.warns(UserWarning, match="thing, other") as caught:
        roles = param_roles(model)
    assert len(caught) == 1
    assert roles["thing"] == "matrix"


def test_an_override_settles_an_ambiguous_parameter_without_a_warning():
    model = Tiny()
    model.thing = nn.Parameter(torch.zeros(6, WIDTH))
    policy = GroupPolicy(overrides=(Override(pattern="thing", role="embed"),))
    assert param_roles(model, policy)["thing"] == "embed"


@pytest.mark.parametrize(
    ("module", "role"),
    [
        (nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, bias=False), "vector"),
        (nn.Conv2d(3, WIDTH, 2, bias=False), "vector"),
        (nn.ConvTranspose1d(WIDTH, WIDTH, 3, bias=False), "vector"),
        (nn.Bilinear(WIDTH, WIDTH, WIDTH, bias=False), "vector"),
        (nn.LayerNorm((4, WIDTH), bias=False), "vector"),
        (nn.Linear(WIDTH, 1, bias=False), "matrix"),
        (nn.EmbeddingBag(VOCABULARY, WIDTH), "embed"),
        (nn.LSTMCell(WIDTH, WIDTH, bias=False), "matrix"),
        (nn.MultiheadAttention(WIDTH, 2, bias=False), "matrix"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_module_of_torch_has_its_role(module, role):
    model = Tiny()
    model.part = module
    assert {r for name, r in param_roles(model).items() if name.startswith("part.")} == {role}


class Experts(nn.Module):
    def __init__(self, *, is_transposed=False):
        super().__init__()
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(torch.zeros(4, 6, WIDTH)),
            nn.Parameter(torch.zeros(4, WIDTH, 3)),
        )
        self.is_transposed = is_transposed


@pytest.mark.parametrize(("experts", "role"), [("scalar", "vector"), ("batched", "matrix")])
def test_stacked_experts_follow_the_policy(experts, role):
    model = Tiny()
    model.experts, model.gain = Experts(), nn.Parameter(torch.zeros(6, 1, 1))
    model.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
    roles = param_roles(model, GroupPolicy(experts=experts))
    assert roles["experts.gate_up_proj"] == roles["experts.down_proj"] == role
    assert roles["gain"] == roles["conv.weight"] == "vector"


@pytest.mark.parametrize(("convolutions", "role"), [("scalar", "vector"), ("flatten", "matrix")])
def test_convolutions_follow_the_policy_but_grouped_ones_are_never_matrices(convolutions, role):
    model = Tiny()
    model.conv, model.depthwise = nn.Conv2d(3, WIDTH, 2), nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
    roles = param_roles(model, GroupPolicy(convolutions=convolutions))
    assert (roles["conv.weight"], roles["depthwise.weight"]) == (role, "vector")


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})


@pytest.mark.parametrize(("adapters", "role"), [("matrix", "matrix"), ("scalar", "vector")])
def test_adapters_follow_the_policy_and_the_frozen_base_has_no_role(adapters, role):
    model = Tiny().requires_grad_(False)
    model.blocks[0]["attn"].q = LoRA(model.blocks[0]["attn"].q)
    model.lm_head = LoRA(model.lm_head)
    roles = param_roles(model, GroupPolicy(adapters=adapters))
    assert set(roles.values()) == {role}
    assert len(roles) == 4


def test_the_partition_is_the_same_under_compile_checkpoint_and_data_parallel_wrappers(tmp_path):
    bare = param_roles(Tiny())
    checkpointed = Tiny()
    checkpointed.blocks[0] = checkpoint_wrapper(checkpointed.blocks[0])
    inner = Tiny()
    inner.blocks[1] = compiled(inner.blocks[1])
    assert param_roles(compiled(Tiny())) == param_roles(checkpointed) == param_roles(inner) == bare
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert param_roles(DistributedDataParallel(Tiny())) == bare
        assert param_roles(compiled(DistributedDataParallel(checkpointed))) == bare
    finally:
        torch.distributed.destroy_process_group()


def test_a_module_of_ones_own_that_is_called_module_keeps_its_name():
    model = nn.ModuleDict({"module": Tiny()})
    assert "module.embed.weight" in param_roles(model)


def test_what_fsdp1_leaves_of_a_model_is_refused(tmp_path):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 warns of a CPU and of its age
            model = FullyShardedDataParallel(Tiny(), device_id=torch.device("cpu"))
            with pytest.raises(ValueError, match=r"flattened.*fully_shard"):
                param_roles(model)
    finally:
        torch.distributed.destroy_process_group()


def test_linear_weights_that_a_wrapper_emptied_are_refused():
    model = Tiny()
    for parameter in model.parameters():
        parameter.data = torch.empty(0)  # as ZeRO-3 leaves them, and FSDP1 with use_orig_params on some ranks
    with pytest.raises(ValueError, match=r"flattened.*embed\.weight"):
        param_roles(model)


@pytest.mark.parametrize("name", ["flat_param", "storage"])
def test_a_model_of_one_flat_parameter_is_refused(name):
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.zeros(1000)))
    with pytest.raises(ValueError, match=f"flattened.*{name}"):
        param_roles(model)


def test_a_lazy_module_is_refused_before_its_first_forward_pass():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls lazy modules experimental
        model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="no shape"):
        param_roles(model)


def test_every_decision_has_a_reason():
    model = GPT(ModelConfig(positions="learned", bias=True))
    reasons = explain_roles(model)
    assert reasons.keys() == {name for name, _ in model.named_parameters()}
    assert reasons["lm_head.weight"] == "named 'lm_head'"
    assert reasons["blocks.0.attn.q.weight"] == "weight of Linear"
    assert all(reasons.values())


def test_the_reason_for_a_tied_table_names_its_other_place():
    assert "lm_head.weight" in explain_roles(GPT(ModelConfig(tied=True)))["embed.weight"]


# --- Properties ---------------------------------------------------------------------------------------------------

LEAVES = {
    "linear": lambda: nn.Linear(3, 5),
    "embed": lambda: nn.Embedding(9, 3),
    "norm": lambda: nn.LayerNorm(3),
    "conv": lambda: nn.Conv1d(3, 4, 2),
    "head": lambda: nn.Linear(3, 9),
    "experts": Experts,
}


def trees(depth):
    """Return a strategy of nested (name, content) lists: what a model consists of, in order."""
    leaf = st.sampled_from(sorted(LEAVES))
    content = leaf if depth == 0 else leaf | trees(depth - 1)
    names = st.sampled_from(["embed", "attn", "output", "head", "lm_head", "mlp", "0", "1", "pos", "layer1", "layer2"])
    return st.lists(st.tuples(names, content), min_size=1, max_size=4, unique_by=lambda pair: pair[0])


def build(tree, order=1):
    model = nn.Module()
    for name, content in tree[::order]:
        model.add_module(name, LEAVES[content]() if isinstance(content, str) else build(content, order))
    return model


def by_parameter(model):
    roles = param_roles(model)
    return {id(parameter): roles[name] for name, parameter in model.named_parameters() if parameter.requires_grad}


@given(trees(2))
@settings(deadline=None, max_examples=100)
def test_every_trainable_parameter_has_one_role(tree):
    model = build(tree)
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 != 0)
    assert list(param_roles(model)) == [name for name, p in model.named_parameters() if p.requires_grad]


@given(trees(2))
@settings(deadline=None, max_examples=100)
def test_the_order_of_registration_changes_no_role(tree):
    assert param_roles(build(tree)) == param_roles(build(tree, order=-1))


@given(trees(2), st.data())
@settings(deadline=None, max_examples=100)
def test_a_table_tied_to_any_layer_is_an_embedding_and_counts_once(tree, data):
    model = build([*tree, ("table", "embed")])
    tied = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 9]
    for module in tied:
        module.weight = model.get_submodule("table").weight
    roles = by_parameter(model)
    assert roles[id(model.get_submodule("table").weight)] == "embed"
    assert len(roles) == len(set(map(id, model.parameters())))


@given(trees(1))
@settings(deadline=None, max_examples=50)
def test_wrappers_and_copies_change_no_role(tree):
    model = build(tree)
    expected = param_roles(model)
    assert param_roles(copy.deepcopy(model)) == expected
    assert param_roles(compiled(model)) == expected
    assert param_roles(checkpoint_wrapper(model)) == expected


# --- Real architectures -------------------------------------------------------------------------------------------

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
# Each: model class, configuration, expected counts of matrix, vector, embed, lm_head, with the sum that they come from.
ARCHITECTURES = {
    # a layer: c_attn, c_proj, c_fc, c_proj (Conv1D); their 4 biases, 2 norms of 2. And ln_f; wte (tied), wpe.
    "GPT2LMHeadModel": ({"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128}, (8, 2 * 8 + 2, 2, 0)),
    # a layer: q, k, v, o, gate, up, down; 2 RMS norms. And the last norm.
    "LlamaForCausalLM": ({**SMALL, "num_key_value_heads": 2}, (14, 5, 1, 1)),
    # a layer: q, k, v without bias, out_proj, c_fc, c_proj with; 2 norms of 2. And ln_f; wte (tied), wpe.
    "GPTNeoForCausalLM": (
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "hidden_size": 64, "num_heads": 4},
        (12, 2 * 7 + 2, 2, 0),
    ),
    # a layer: qkv, dense, up, down with biases; 2 norms of 2. And the last norm; embed_out is not tied.
    "GPTNeoXForCausalLM": (SMALL, (8, 2 * 8 + 2, 1, 1)),
    # an encoder layer: 4 + 2 matrices, 2 norms; a decoder layer: 4 + 4 + 2, 3 norms; 2 last norms. Tables: shared
    # (tied) and one of relative positions in each stack.
    "T5ForConditionalGeneration": (
        {"num_layers": 2, "num_decoder_layers": 2, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4},
        (2 * 6 + 2 * 10, 2 * 2 + 2 * 3 + 2, 3, 0),
    ),
    # a layer: q, k, v, o, router; 2 norms and 2 stacks of experts (scalar by default). And the last norm.
    "MixtralForCausalLM": ({**SMALL, "num_key_value_heads": 2}, (10, 2 * 4 + 1, 1, 1)),
    # the same, with biases of q, k, v, o, router and both stacks, and sinks. Experts are stored (in, out).
    "GptOssForCausalLM": (
        {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 16},
        (10, 2 * (2 + 2 + 8) + 1, 1, 1),
    ),
    # a layer: in, x, dt, out projections; norm, A_log, D, convolution and its bias, bias of dt. And norm_f; tied.
    "MambaForCausalLM": ({"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128}, (8, 2 * 6 + 1, 1, 0)),
    # a layer: q, k, v, output, intermediate, output with biases; 2 norms of 2. Tables of words (tied), positions,
    # types, with a norm. The head: a dense layer, its bias and norm, and the bias of the logits.
    "BertForMaskedLM": (SMALL, (12 + 1, 2 * 10 + 2 + 4, 3, 0)),
    # a layer: q, k, v, out, fc1, fc2 with biases; 2 norms of 2. And the last norm; tokens (tied) and positions.
    "OPTForCausalLM": (
        {"num_hidden_layers": 2, "hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 64},
        (12, 2 * 10 + 2, 2, 0),
    ),
    # a layer: 4 + 3 matrices; 2 norms of 2, decay, first, 3 + 2 mixing vectors. And norms before and after; `head`.
    "RwkvForCausalLM": (
        {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128, "attention_hidden_size": 64},
        (14, 2 * 11 + 4, 1, 1),
    ),
    # a layer: q, k, v, o, gate, up, down; 4 RMS norms. And the last norm; tied.
    "Gemma2ForCausalLM": ({**SMALL, "num_key_value_heads": 2, "head_dim": 16}, (14, 2 * 4 + 1, 1, 0)),
}


def architecture(name, config):
    cls = getattr(transformers, name)
    with torch.device("meta"):
        return cls(cls.config_class(**config))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_real_architecture_has_the_expected_roles(name):
    config, expected = ARCHITECTURES[name]
    roles = list(param_roles(architecture(name, config)).values())
    assert tuple(roles.count(role) for role in ("matrix", "vector", "embed", "lm_head")) == expected


def test_batched_experts_of_a_real_architecture_are_matrices():
    config, (matrix, vector, *_) = ARCHITECTURES["MixtralForCausalLM"]
    roles = list(param_roles(architecture("MixtralForCausalLM", config), GroupPolicy(experts="batched")).values())
    assert (roles.count("matrix"), roles.count("vector")) == (matrix + 4, vector - 4)
