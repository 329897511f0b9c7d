"""The decision: matrix, vector, embed or lm_head, and why.

It goes by what a module is and where it sits, by the identity of tied tables, by whole words of dotted names, and by
Hugging Face's ``get_input_embeddings`` / ``get_output_embeddings``. The number of dimensions comes last. The four roles
come from https://github.com/microsoft/dion and from NVIDIA NeMo Automodel ``components/optim/dion``.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import UninitializedParameter

from ...config import GroupPolicy, Override, Role
from .names import meaning
from .overrides import claims
from .sites import Place, Places, find_places, kind, words
from .tables import Tables, fan, find_tables

DEFAULT = GroupPolicy()

# fmt: off
_ADAPTERS = frozenset({
    "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_a", "lora_b", "lora_down", "lora_up",
})
# fmt: on


class Decision(NamedTuple):
    """The role of one parameter, and why."""

    name: str  # canonical, where it is registered first
    parameter: nn.Parameter
    role: Role
    reason: str
    unsure: bool = False  # taken as a matrix because nothing says what it is
    fan: tuple[int, int] | None = None  # true (fan_out, fan_in) of a head, or of a matrix stored (in, out)
    flatten: bool = False  # to be seen as a matrix fan_out x (all other dims)
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

    An ambiguous parameter is taken as a matrix, marked ``unsure``, and named in one warning.

    Raises:
        ValueError: a wrapper has flattened the matrices; a parameter has no shape yet; an override matches nothing, two
            overrides match one parameter, or one makes a matrix of a parameter with fewer than two dimensions.
    """
    places = find_places(model)
    _refuse_shapeless(places.first)
    tables = find_tables(places)
    claimed = claims(policy.overrides, places)
    trainable, frozen = [], []
    for place in places.first:
        decided = _decide(place, places, tables, policy)
        if not place.parameter.requires_grad:
            frozen.append(decided)
        elif id(place.parameter) in claimed:
            trainable.append(_overridden(decided, claimed[id(place.parameter)]))
        else:
            trainable.append(decided)
    unsure = [d.name for d in trainable if d.unsure]
    if unsure:
        more = f" and {len(unsure) - 8} more" if len(unsure) > 8 else ""
        warnings.warn(
            f"these may be matrices or tables, and are taken as matrices: {', '.join(unsure[:8])}{more}; "
            "GroupPolicy(overrides=...) decides it",
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


def _refuse_shapeless(places: list[Place]) -> None:
    """Refuse parameters without a shape (lazy modules), and matrices that FSDP1 or ZeRO has flattened."""
    lazy = [place.name for place in places if isinstance(place.parameter, UninitializedParameter)]
    if lazy:
        raise ValueError(f"these parameters have no shape before the first forward pass: {', '.join(lazy[:8])}")
    thin = [place for place in places if place.parameter.ndim < 2]
    flat = [place.name for place in thin if _is_flattened(place)]
    if not flat and len(thin) == len(places):  # only vectors: is it a norm, or a model that was flattened?
        flat = [p.name for p in thin if kind(p.module) == "custom" and meaning(p) == "" and p.parameter.numel() > 1]
    if flat:
        raise ValueError(
            "a wrapper (FSDP1, ZeRO) has flattened matrices to one dimension, so there is nothing to orthogonalize: "
            f"{', '.join(flat[:8])}; shard with torch.distributed.fsdp.fully_shard instead"
        )


def _is_flattened(place: Place) -> bool:
    matrix = place.local == "weight" and kind(place.module) in ("linear", "embedding", "conv1d")
    return matrix or place.local in ("_flat_param", "flat_param")


def _decide(place: Place, places: Places, tables: Tables, policy: GroupPolicy) -> Decision:
    """Return the decision for one parameter, before overrides."""
    parameter, name, module = place.parameter, place.name, place.module
    key, stored = id(parameter), kind(module)
    if parameter.ndim < 2:
        return Decision(name, parameter, "vector", "fewer than two dimensions")
    if "lora" in name and not _ADAPTERS.isdisjoint(name.split(".")):
        role: Role = "matrix" if policy.adapters == "matrix" else "vector"
        return Decision(name, parameter, role, f"low-rank adapter, by policy adapters={policy.adapters!r}")
    if key in tables.inputs:
        also = ", ".join(other.name for other in places.also.get(key, ()))
        return Decision(name, parameter, "embed", tables.inputs[key] + (f", also {also}" if also else ""))
    if key in tables.heads:
        return Decision(name, parameter, "lm_head", tables.heads[key], fan=fan(place, tables.rows))
    if stored == "norm":
        return Decision(name, parameter, "vector", f"gain of {type(module).__name__}")
    if stored == "convolution":
        return _convolution(place, policy)
    linear = stored in ("linear", "conv1d") or hasattr(module, "in_features")
    if parameter.ndim == 2 and linear and (place.local == "weight" or "bias" not in words(place.local)):
        turned = fan(place) if stored == "conv1d" else None
        reason = f"{place.local} of {type(module).__name__}" + (", stored (in, out)" if turned else "")
        return Decision(name, parameter, "matrix", reason, fan=turned)
    return _bare(place, tables, policy)


def _convolution(place: Place, policy: GroupPolicy) -> Decision:
    plain = getattr(place.module, "groups", 1) == 1 and not getattr(place.module, "transposed", False)
    if policy.convolutions == "flatten" and plain and place.local == "weight":
        reason = "convolution as one matrix, by policy convolutions='flatten'"
        return Decision(place.name, place.parameter, "matrix", reason, flatten=True)
    reason = "convolution" if plain else "grouped or transposed convolution"
    return Decision(place.name, place.parameter, "vector", reason)


def _bare(place: Place, tables: Tables, policy: GroupPolicy) -> Decision:
    """Return the decision for a parameter of a custom module: by the words of its name, then by its shape."""
    parameter, name, named, meant = place.parameter, place.name, f"named {place.label!r}", meaning(place)
    if meant == "vector":
        return Decision(name, parameter, "vector", f"{named}: a bias, gain or state-space coefficient")
    if meant == "table":
        return Decision(name, parameter, "embed", f"{named}: a table")
    if kind(place.module) == "embedding" and meant != "map":
        return Decision(name, parameter, "embed", f"table of {type(place.module).__name__}")
    if sum(size > 1 for size in parameter.shape) < 2:
        return Decision(name, parameter, "vector", "one row or one column")
    if parameter.ndim == 2 and meant == "map":
        return Decision(name, parameter, "matrix", f"{named}: a linear map")
    if parameter.ndim == 2 and parameter.shape[0] in tables.rows:
        return Decision(name, parameter, "embed", "as many rows as the embedding")
    if parameter.ndim == 2:
        return Decision(name, parameter, "matrix", "two dimensions, and nothing says more", unsure=True)
    if policy.experts == "batched" and parameter.ndim == 3 and min(parameter.shape[-2:]) > 1:
        turned = fan(place) if getattr(place.module, "is_transposed", None) is True else None
        return Decision(name, parameter, "matrix", "batch of matrices, by policy experts='batched'", fan=turned)
    return Decision(name, parameter, "vector", "three or more dimensions")
