"""Parameter -> role, with the reason: matrix, vector, embed or lm_head, for any PyTorch model.

Decided by what a module is and where it sits, by the identity of tied tables, by whole dotted name components, by
Hugging Face's ``get_input_embeddings`` / ``get_output_embeddings``; by the number of dimensions only last. The four
roles come from https://github.com/microsoft/dion and from NVIDIA NeMo Automodel ``components/optim/dion``.
"""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple

from torch import nn

from .config import GroupPolicy, Override
from .overrides import claims
from .sites import Owner, Site, kind, sites, words

Role = Literal["matrix", "vector", "embed", "lm_head"]

_FLAT_PARTS = {"_flat_param", "flat_param"}  # FSDP1's one-dimensional storage
_HEADS = {"lm_head", "lm_heads", "embed_out", "unembed", "unembedding", "output_embeddings", "head", "output"}
_ADAPTERS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_a", "lora_b", "lora_down", "lora_up"}
# fmt: off
_TABLE_WORDS = frozenset({
    "embed", "embeds", "embedding", "embeddings", "emb", "embs", "wte", "wpe", "pos", "position", "positions",
    "positional", "table", "token", "tokens", "cls", "codebook", "codebooks", "prompt", "vocab", "lut",
})
_VECTOR_WORDS = frozenset({
    "bias", "biases", "gain", "gains", "gamma", "beta", "scale", "scales", "norm", "ln", "log", "decay", "mix", "shift",
    "temperature",
})
_MAP_WORDS = frozenset({"weight", "weights", "proj", "projection", "projections", "kernel", "matrix", "w", "mixing"})
_POSITION_WORDS = frozenset({
    "pos", "position", "positions", "positional", "wpe", "type", "types", "segment", "relative", "rel",
})
# fmt: on
DEFAULT = GroupPolicy()


class Decision(NamedTuple):
    """The role of one parameter, and why."""

    name: str  # canonical, of the first place where it is registered
    parameter: nn.Parameter
    role: Role
    reason: str
    unsure: bool = False  # taken as a matrix for want of a better sign
    fan: tuple[int, int] | None = None  # true (fan_out, fan_in) of a head, or of a matrix stored (in, out)
    flatten: bool = False  # a matrix fan_out x (all the rest)
    override: Override | None = None


class _Facts(NamedTuple):
    """What has to be known of the whole model before one parameter can be judged; parameters by ``id``."""

    tables: dict[int, str]  # id -> reason
    heads: dict[int, str]  # id -> reason
    rows: frozenset[int]  # of the token tables: the sizes of the vocabularies


def param_roles(model: nn.Module, policy: GroupPolicy = DEFAULT) -> dict[str, Role]:
    """Return the role of every trainable parameter by canonical name, in the order of ``named_parameters``.

    Prefixes of compile, DDP, FSDP and checkpoint wrappers are removed from names; a tied parameter appears once.

    Raises:
        ValueError: see ``decide_roles``.
    """
    return {decision.name: decision.role for decision in decide_roles(model, policy)[0]}


def explain_roles(model: nn.Module, policy: GroupPolicy = DEFAULT) -> dict[str, str]:
    """Return the reason for the role of every trainable parameter, by the same names as ``param_roles``."""
    return {decision.name: decision.reason for decision in decide_roles(model, policy)[0]}


def decide_roles(model: nn.Module, policy: GroupPolicy = DEFAULT) -> tuple[list[Decision], list[Decision]]:
    """Return a decision for every trainable and one for every frozen parameter, in the order of ``named_parameters``.

    What stays ambiguous is taken as a matrix, marked ``unsure``, and named in one warning.

    Raises:
        ValueError: a wrapper flattened the matrices away; an override matches nothing, or two match one parameter, or
            one makes a matrix of what has fewer than two dimensions.
    """
    found, modules = sites(model)
    _refuse_flattened(found)
    facts = _facts(found, modules)
    claimed = claims(policy.overrides, found)
    trainable, frozen = [], []
    for site in found:
        decided = _decide(site, facts, policy)
        if site.parameter.requires_grad:
            trainable.append(
                _overridden(decided, claimed[id(site.parameter)]) if id(site.parameter) in claimed else decided
            )
        else:
            frozen.append(decided)
    unsure = [d.name for d in trainable if d.unsure]
    if unsure:
        more = f" and {len(unsure) - 8} more" if len(unsure) > 8 else ""
        warnings.warn(
            f"nothing tells whether these are matrices or tables, they are taken as matrices: {', '.join(unsure[:8])}"
            f"{more}; GroupPolicy(overrides=...) settles it",
            stacklevel=3,
        )
    return trainable, frozen


def _overridden(decided: Decision, override: Override) -> Decision:
    if override.role == "matrix" and override.algorithm is None and decided.parameter.ndim < 2:
        raise ValueError(
            f"the override {override.pattern!r} makes a matrix of {decided.name!r}, which has fewer than two dimensions"
        )
    reason = f"override {override.pattern!r}"
    return decided._replace(role=override.role, reason=reason, unsure=False, override=override)


def _refuse_flattened(found: list[Site]) -> None:
    """Refuse what FSDP1 and ZeRO leave of matrices: one-dimensional storage."""
    flat = [
        owner.name
        for site in found
        if site.parameter.ndim < 2
        for owner in site.owners
        if owner.local in _FLAT_PARTS
        or (owner.local == "weight" and kind(type(owner.module)) in ("linear", "embedding", "conv1d"))
    ]
    if flat:
        raise ValueError(
            f"a wrapper (FSDP1, ZeRO) flattened the matrices to one dimension, none is left to orthogonalize: "
            f"{', '.join(flat[:4])}; shard with torch.distributed.fsdp.fully_shard instead"
        )


def _facts(found: list[Site], modules: list[nn.Module]) -> _Facts:
    """Return the model's tables and heads: Hugging Face's word, then module kinds and names, then shapes."""
    tables, heads = _accessors(modules, "get_input_embeddings"), _accessors(modules, "get_output_embeddings")
    rows = {p.shape[0] for p in tables.values()}
    reasons = dict.fromkeys(tables, "input embedding by get_input_embeddings")
    for site in found:
        for owner in site.owners:
            if (
                owner.local == "weight"
                and kind(type(owner.module)) == "embedding"
                and id(site.parameter) not in reasons
            ):
                reasons[id(site.parameter)] = f"table of {type(owner.module).__name__}"
                if not tables and _POSITION_WORDS.isdisjoint(words(" ".join(owner.path[-1:]))):
                    rows.add(site.parameter.shape[0])
    head_reasons = dict.fromkeys(heads, "output embedding by get_output_embeddings")
    return _Facts(reasons, head_reasons | _heads(found, reasons, frozenset(rows), bool(heads)), frozenset(rows))


def _accessors(modules: list[nn.Module], accessor: str) -> dict[int, nn.Parameter]:
    """Return, by ``id``, the two-dimensional tables that the modules' own ``accessor`` methods lead to."""
    tables = {}
    for module in modules:
        if hasattr(type(module), accessor):
            try:
                weight = getattr(getattr(module, accessor)(), "weight", None)
            except (NotImplementedError, AttributeError, TypeError):
                continue  # Hugging Face raises for models without text
            if isinstance(weight, nn.Parameter) and weight.ndim == 2:
                tables[id(weight)] = weight
    return tables


def _heads(found: list[Site], tables: dict[int, str], rows: frozenset[int], known: bool) -> dict[int, str]:
    """Return the heads that names tell, outside the repeated blocks, or else the one that its shape tells."""
    named: dict[int, str] = {}
    shaped: dict[int, str] = {}
    for site in found:
        if site.parameter.ndim != 2 or id(site.parameter) in tables:
            continue
        for owner in site.owners:
            if owner.inside or kind(type(owner.module)) not in ("linear", "conv1d", "custom"):
                continue
            part = _head_part(owner)
            if part in _HEADS:
                named[id(site.parameter)] = f"named {part!r}, outside the repeated blocks"
            elif _fan(owner, site.parameter, rows)[0] in rows and owner.local == "weight":
                shaped[id(site.parameter)] = "as many outputs as the embedding has rows, outside the repeated blocks"
    return named or ({} if known or len(shaped) > 1 else shaped)


def _head_part(owner: Owner) -> str:
    """Return the component that names a possible head: the module's own, or its list's (``lm_heads.0``)."""
    path = [part for part in (*owner.path, *(() if owner.local == "weight" else (owner.local,))) if not part.isdigit()]
    return path[-1] if path else ""


def _fan(owner: Owner, parameter: nn.Parameter, rows: frozenset[int]) -> tuple[int, int]:
    """Return the true (fan_out, fan_in) of a two-dimensional parameter."""
    fan_out, fan_in = parameter.shape
    stored = kind(type(owner.module))
    transposed = stored == "conv1d" or (stored == "custom" and fan_out not in rows and fan_in in rows)
    return (fan_in, fan_out) if transposed else (fan_out, fan_in)


def _decide(site: Site, facts: _Facts, policy: GroupPolicy) -> Decision:
    """Return the decision for one parameter, before overrides."""
    parameter, owners = site
    owner = owners[0]
    name, key = owner.name, id(parameter)
    if parameter.ndim < 2:
        return Decision(name, parameter, "vector", "fewer than two dimensions")
    if not _ADAPTERS.isdisjoint(owner.path) or owner.local in _ADAPTERS:
        role: Role = "matrix" if policy.adapters == "matrix" else "vector"
        return Decision(name, parameter, role, f"low-rank adapter, by policy adapters={policy.adapters!r}")
    if key in facts.tables:
        also = ", ".join(o.name for o in owners[1:])
        return Decision(name, parameter, "embed", facts.tables[key] + (f", tied to {also}" if also else ""))
    if key in facts.heads:
        return Decision(name, parameter, "lm_head", facts.heads[key], fan=_fan(owner, parameter, facts.rows))
    stored = kind(type(owner.module))
    if stored == "norm":
        return Decision(name, parameter, "vector", f"gain of {type(owner.module).__name__}")
    if stored == "convolution":
        return _convolution(owner, parameter, policy)
    if parameter.ndim == 2 and stored == "linear" and words(owner.local)[-1:] != ("bias",):
        return Decision(name, parameter, "matrix", f"{owner.local} of {type(owner.module).__name__}")
    if parameter.ndim == 2 and stored == "conv1d":
        return Decision(
            name, parameter, "matrix", "weight of Conv1D, stored (in, out)", fan=tuple(reversed(parameter.shape))
        )
    return _bare(owner, parameter, facts, policy)


def _convolution(owner: Owner, parameter: nn.Parameter, policy: GroupPolicy) -> Decision:
    plain = getattr(owner.module, "groups", 1) == 1 and not getattr(owner.module, "transposed", False)
    if policy.convolutions == "flatten" and plain and owner.local == "weight":
        reason = "convolution as a matrix, by policy convolutions='flatten'"
        return Decision(owner.name, parameter, "matrix", reason, flatten=True)
    return Decision(owner.name, parameter, "vector", "convolution" if plain else "grouped or transposed convolution")


def _bare(owner: Owner, parameter: nn.Parameter, facts: _Facts, policy: GroupPolicy) -> Decision:
    """Return the decision for a parameter of a custom module: its name's words, then its shape."""
    name, found = owner.name, words(owner.local)
    last = found[-1] if found else ""
    if last in _VECTOR_WORDS:
        return Decision(name, parameter, "vector", f"named a {last}")
    table = {*found, *(words(owner.path[-1]) if owner.path and last in _MAP_WORDS else ())} & _TABLE_WORDS
    if last in _TABLE_WORDS or (table and last not in _MAP_WORDS) or kind(type(owner.module)) == "embedding":
        return Decision(name, parameter, "embed", "named like a table")
    if sum(size > 1 for size in parameter.shape) < 2:
        return Decision(name, parameter, "vector", "one row or one column")
    if parameter.ndim == 2:
        if parameter.shape[0] in facts.rows:
            return Decision(name, parameter, "embed", "as many rows as the embedding")
        return Decision(name, parameter, "matrix", "two dimensions and no better sign", unsure=True)
    if policy.experts == "batched" and min(parameter.shape[-2:]) > 1:
        return Decision(name, parameter, "matrix", "batch of matrices, by policy experts='batched'")
    return Decision(name, parameter, "vector", "three or more dimensions")
