"""Parameter -> role, with the reason: matrix, vector, embed or lm_head, for any PyTorch model.

Decided by what a module is and where it sits, by the identity of tied tables, by whole dotted name components, by
Hugging Face's ``get_input_embeddings`` / ``get_output_embeddings``; by the number of dimensions only last. The four
roles come from https://github.com/microsoft/dion and from NVIDIA NeMo Automodel ``components/optim/dion``.
"""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple

from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from .config import GroupPolicy, Override
from .overrides import claims
from .sites import Owner, Site, kind, sites, words
from .tables import Tables, fan, find_tables, label

Role = Literal["matrix", "vector", "embed", "lm_head"]
DEFAULT = GroupPolicy()

_FLAT_PARTS = frozenset({"_flat_param", "flat_param"})  # FSDP1's one-dimensional storage
# fmt: off
_ADAPTERS = frozenset({
    "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_a", "lora_b", "lora_down", "lora_up",
})
_TABLE_WORDS = frozenset({
    "embed", "embeds", "embedding", "embeddings", "emb", "embs", "wte", "wpe", "pos", "position", "positions",
    "positional", "table", "token", "tokens", "cls", "codebook", "codebooks", "prompt", "vocab", "lut", "latent",
    "latents", "queries", "registers",
})
_VECTOR_WORDS = frozenset({
    "bias", "biases", "gain", "gains", "gamma", "beta", "scale", "scales", "norm", "ln", "log", "decay", "mix", "shift",
    "temperature",
})
_MAP_WORDS = frozenset({"proj", "projection", "projections", "kernel", "matrix", "fc", "dense", "linear", "mixing"})
# fmt: on
_WEIGHT_WORDS = frozenset({"weight", "weights"})


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
        ValueError: a wrapper flattened the matrices away; a parameter has no shape yet; an override matches nothing,
            or two match one parameter, or one makes a matrix of what has fewer than two dimensions.
    """
    found, modules = sites(model)
    _refuse_shapeless(found)
    tables = find_tables(found, modules)
    claimed = claims(policy.overrides, found)
    trainable, frozen = [], []
    for site in found:
        decided = _decide(site, tables, policy)
        if not site.parameter.requires_grad:
            frozen.append(decided)
            continue
        override = claimed.get(id(site.parameter))
        trainable.append(decided if override is None else _overridden(decided, override))
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


def _refuse_shapeless(found: list[Site]) -> None:
    """Refuse parameters without a shape (lazy modules), and what FSDP1 and ZeRO leave of matrices: flat storage."""
    lazy = [site.owners[0].name for site in found if isinstance(site.parameter, UninitializedTensorMixin)]
    if lazy:
        raise ValueError(f"these parameters have no shape before the first forward pass: {', '.join(lazy[:8])}")
    flat = [site.owners[0].name for site in found if site.parameter.ndim < 2 and any(map(_flat, site.owners))]
    plain = [site.owners[0] for site in found if site.parameter.ndim < 2]
    if not flat and len(plain) == len(found):  # no matrix anywhere: is it a norm, or all that is left of a model?
        flat = [
            owner.name for owner in plain if kind(type(owner.module)) == "custom" and words(owner.local) == ("flat",)
        ]
    if flat:
        raise ValueError(
            "a wrapper (FSDP1, ZeRO) has flattened matrices to one dimension, so that none is left to orthogonalize: "
            f"{', '.join(flat[:8])}; shard with torch.distributed.fsdp.fully_shard instead"
        )


def _flat(owner: Owner) -> bool:
    matrix = owner.local == "weight" and kind(type(owner.module)) in ("linear", "embedding", "conv1d")
    return matrix or owner.local in _FLAT_PARTS


def _decide(site: Site, tables: Tables, policy: GroupPolicy) -> Decision:
    """Return the decision for one parameter, before overrides."""
    parameter, owners = site
    owner, key = owners[0], id(parameter)
    name = owner.name
    if parameter.ndim < 2:
        return Decision(name, parameter, "vector", "fewer than two dimensions")
    if owner.local in _ADAPTERS or not _ADAPTERS.isdisjoint(owner.path):
        role: Role = "matrix" if policy.adapters == "matrix" else "vector"
        return Decision(name, parameter, role, f"low-rank adapter, by policy adapters={policy.adapters!r}")
    if key in tables.inputs:
        also = ", ".join(o.name for o in owners[1:])
        return Decision(name, parameter, "embed", tables.inputs[key] + (f", also {also}" if also else ""))
    if key in tables.heads:
        return Decision(name, parameter, "lm_head", tables.heads[key], fan=fan(owner, parameter, tables.rows))
    stored = kind(type(owner.module))
    if stored == "norm":
        return Decision(name, parameter, "vector", f"gain of {type(owner.module).__name__}")
    if stored == "convolution":
        return _convolution(owner, parameter, policy)
    linear = stored in ("linear", "conv1d") or hasattr(owner.module, "in_features")
    if parameter.ndim == 2 and linear and "bias" not in words(owner.local):
        turned = fan(owner, parameter) if stored == "conv1d" else None
        reason = f"{owner.local} of {type(owner.module).__name__}" + (", stored (in, out)" if turned else "")
        return Decision(name, parameter, "matrix", reason, fan=turned)
    return _bare(owner, parameter, tables, policy)


def _convolution(owner: Owner, parameter: nn.Parameter, policy: GroupPolicy) -> Decision:
    plain = getattr(owner.module, "groups", 1) == 1 and not getattr(owner.module, "transposed", False)
    if policy.convolutions == "flatten" and plain and owner.local == "weight":
        reason = "convolution as one matrix, by policy convolutions='flatten'"
        return Decision(owner.name, parameter, "matrix", reason, flatten=True)
    return Decision(owner.name, parameter, "vector", "convolution" if plain else "grouped or transposed convolution")


def _bare(owner: Owner, parameter: nn.Parameter, tables: Tables, policy: GroupPolicy) -> Decision:
    """Return the decision for a parameter of a custom module: the words of its name first, then its shape."""
    name, found = owner.name, words(label(owner))
    purpose = found[:-1] if found[-1:] and found[-1] in _WEIGHT_WORDS else found
    last = purpose[-1] if purpose else ""
    if "bias" in found or last in _VECTOR_WORDS or (owner.local == "D" and hasattr(owner.module, "A_log")):
        return Decision(name, parameter, "vector", f"named {label(owner)!r}: a bias, gain or state-space coefficient")
    if last not in _MAP_WORDS:
        if kind(type(owner.module)) == "embedding":
            return Decision(name, parameter, "embed", f"table of {type(owner.module).__name__}")
        if not _TABLE_WORDS.isdisjoint(purpose):
            return Decision(name, parameter, "embed", f"named {label(owner)!r}: a table")
    if sum(size > 1 for size in parameter.shape) < 2:
        return Decision(name, parameter, "vector", "one row or one column")
    if parameter.ndim == 2:
        if parameter.shape[0] in tables.rows and last not in _MAP_WORDS:
            return Decision(name, parameter, "embed", "as many rows as the embedding")
        if last in _MAP_WORDS:
            return Decision(name, parameter, "matrix", f"named {label(owner)!r}: a linear map")
        return Decision(name, parameter, "matrix", "two dimensions and no better sign", unsure=True)
    if policy.experts == "batched" and parameter.ndim == 3 and min(parameter.shape[-2:]) > 1:
        turned = fan(owner, parameter) if getattr(owner.module, "is_transposed", None) is True else None
        return Decision(name, parameter, "matrix", "batch of matrices, by policy experts='batched'", fan=turned)
    return Decision(name, parameter, "vector", "three or more dimensions")
