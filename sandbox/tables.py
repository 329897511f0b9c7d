"""A model's input tables and output heads: found by identity, by Hugging Face's accessors, by names, by shape."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from .sites import Owner, Site, kind, words

LINEAR = ("linear", "conv1d", "custom")  # kinds of modules that may own a head

# A module of these names is a head wherever it sits; or outside the repeated blocks; or there with a fitting shape.
_ALWAYS = frozenset({"lm_head", "lm_heads"})
_OUTSIDE = frozenset({"embed_out", "unembed", "unembedding", "output_embeddings"})
# fmt: off
_FITTING = frozenset({
    "head", "heads", "output", "output_layer", "output_projection", "out", "out_proj", "proj_out", "to_logits",
    "logits", "fc_out", "decoder", "generator", "predictions", "vocab_proj", "final",
})
_POSITION_WORDS = frozenset({
    "pos", "position", "positions", "positional", "wpe", "pe", "type", "types", "segment", "relative", "rel", "time",
})
# fmt: on
_PADDING = 64  # a head's rows may be padded up to a multiple of this (nanoGPT: 50257 -> 50304)
_FEWEST = 5  # rows of a vocabulary; smaller tables hold mask tokens, segments, levels


class Tables(NamedTuple):
    """Which parameters, by ``id``, are input tables and which are heads, each with the reason."""

    inputs: dict[int, str]
    heads: dict[int, str]
    rows: frozenset[int]  # of the token tables: the sizes of the vocabularies


def find_tables(found: list[Site], modules: list[nn.Module]) -> Tables:
    """Return the input tables and the heads; what is both (a tied table) counts as an input table."""
    given = _accessors(modules, "get_input_embeddings")
    inputs = dict.fromkeys(given, "input embedding by get_input_embeddings")
    tokens: dict[tuple[int, int], int] = {}  # shape of a token table -> how deep in the model it sits
    for site in found:
        for owner in site.owners:
            key, shape = id(site.parameter), tuple(site.parameter.shape)
            if owner.local == "weight" and kind(type(owner.module)) == "embedding":
                inputs.setdefault(key, f"table of {type(owner.module).__name__}")
            if key in inputs and (key in given or not given) and shape[0] >= _FEWEST and not _positional(owner):
                tokens[shape] = min(tokens.get(shape, len(owner.path)), len(owner.path))
    rows = frozenset(rows for rows, _ in tokens)
    heads = dict.fromkeys(_accessors(modules, "get_output_embeddings"), "output embedding by get_output_embeddings")
    heads = _named(found, inputs, rows, known=bool(heads)) | heads
    return Tables(inputs, heads or _shaped(found, inputs, tokens), rows)


def _positional(owner: Owner) -> bool:
    return bool(owner.path) and not _POSITION_WORDS.isdisjoint(words(owner.path[-1]))


def _accessors(modules: list[nn.Module], accessor: str) -> set[int]:
    """Return the ``id`` of each two-dimensional table that the modules' own ``accessor`` methods lead to."""
    tables = set()
    for module in modules:
        if hasattr(type(module), accessor):
            try:
                table = getattr(module, accessor)()
            except (NotImplementedError, AttributeError, TypeError):
                continue  # so does Hugging Face where a model has no text
            weight = getattr(table, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim == 2:
                patches = accessor == "get_input_embeddings" and kind(type(table)) not in ("embedding", "custom")
                if not patches:  # a vision model's "input embedding" is a linear layer over pixels
                    tables.add(id(weight))
    return tables


def label(owner: Owner) -> str:
    """Return the component that names a parameter's purpose: not ``weight``, not a number in a list."""
    for part in (*(() if owner.local == "weight" else (owner.local,)), *reversed(owner.path)):
        if not part.isdigit():
            return part
    return ""


def _named(found: list[Site], inputs: dict[int, str], rows: frozenset[int], *, known: bool) -> dict[int, str]:
    """Return the heads by name; where Hugging Face knows the head, by an unmistakable name only."""
    heads = {}
    for site in found:
        if site.parameter.ndim != 2 or id(site.parameter) in inputs:
            continue
        for owner in site.owners:
            name, names = label(owner), {label(owner), *owner.path[-1:]}
            if not names.isdisjoint(_ALWAYS):
                where = ""
            elif not owner.inside and not names.isdisjoint(_OUTSIDE):
                where = ", outside the repeated blocks"
            elif not owner.inside and not known and name in _FITTING and _fits(owner, site, rows):
                where = ", outside the repeated blocks, with an output for each row of the embedding"
            else:
                continue
            if kind(type(owner.module)) in LINEAR:
                heads[id(site.parameter)] = f"named {name!r}{where}"
    return heads


def _fits(owner: Owner, site: Site, rows: frozenset[int]) -> bool:
    outputs = fan(owner, site.parameter, rows)[0]
    return any(count <= outputs < count + _PADDING for count in rows)


def _shaped(found: list[Site], inputs: dict[int, str], tokens: dict[tuple[int, int], int]) -> dict[int, str]:
    """Return the linear layers of the largest token table's shape that sit outside the blocks, no deeper than it.

    A square shape says nothing.
    """
    shape = max(tokens, default=(0, 0))
    heads = {}
    for site in found:
        if tuple(site.parameter.shape) == shape and shape[0] != shape[1] and id(site.parameter) not in inputs:
            for owner in site.owners:
                shallow = not owner.inside and len(owner.path) <= tokens[shape]
                if shallow and kind(type(owner.module)) == "linear":
                    heads[id(site.parameter)] = "of the embedding's shape, outside the repeated blocks"
    return heads


def fan(owner: Owner, parameter: nn.Parameter, rows: frozenset[int] = frozenset()) -> tuple[int, int]:
    """Return the true (fan_out, fan_in) of a matrix, whichever way it is stored; ``rows`` tell which is a head's."""
    first, second = parameter.shape[-2:]
    stored = kind(type(owner.module))
    turned = stored == "conv1d" or getattr(owner.module, "is_transposed", None) is True
    turned = turned or (stored == "custom" and first not in rows and second in rows)
    return (second, first) if turned else (first, second)
