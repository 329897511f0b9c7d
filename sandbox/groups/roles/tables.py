"""A model's input tables and output heads: found by identity, by Hugging Face's accessors, by names, by shape."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import nn

from .names import meaning, positional
from .sites import Place, Places, kind

LINEAR = ("linear", "conv1d", "custom")  # kinds of modules that may own a head

# A module of these names is a head: anywhere; outside the repeated blocks; outside them and with a fitting shape.
_ALWAYS = frozenset({"lm_head", "lm_heads"})
_OUTSIDE = frozenset({"embed_out", "unembed", "unembedding", "output_embeddings"})
# fmt: off
_FITTING = frozenset({
    "head", "heads", "output", "output_layer", "output_projection", "out", "out_proj", "proj_out", "to_logits",
    "logits", "fc_out", "decoder", "generator", "predictions", "vocab_proj", "final",
})
# fmt: on
_PADDING = 64  # a head's rows may be padded up to a multiple of this (nanoGPT: 50257 -> 50304)
_FEWEST = 5  # rows of a vocabulary; smaller tables hold mask tokens, segments or levels


class Tables(NamedTuple):
    """Which parameters, by ``id``, are input tables and which are heads, each with the reason."""

    inputs: dict[int, str]
    heads: dict[int, str]
    rows: frozenset[int]  # of the token tables: the sizes of the vocabularies


def find_tables(places: Places) -> Tables:
    """Return the input tables and the heads; a tied table, which is both, counts as an input table."""
    given = _accessors(places, "get_input_embeddings")
    inputs = dict.fromkeys(given, "input embedding by get_input_embeddings")
    tokens: dict[tuple[int, ...], int] = {}  # shape of a token table -> how deep in the model it sits
    every = [place for place in (*places.first, *itertools.chain(*places.also.values())) if place.parameter.ndim == 2]
    for place in every:
        key, stored = id(place.parameter), kind(place.module)
        if place.local == "weight" and stored == "embedding":
            inputs.setdefault(key, f"table of {type(place.module).__name__}")
        bare = stored == "custom" and meaning(place) == "table"
        token = key in given if given else (key in inputs or bare)
        if token and place.parameter.shape[0] >= _FEWEST and not positional(place):
            shape, depth = tuple(place.parameter.shape), len(place.path)
            tokens[shape] = min(tokens.get(shape, depth), depth)
    rows = frozenset(rows for rows, _ in tokens)
    heads = dict.fromkeys(_accessors(places, "get_output_embeddings"), "output embedding by get_output_embeddings")
    others = [p for p in every if id(p.parameter) not in inputs and kind(p.module) in LINEAR]
    heads = _named(others, rows, known=bool(heads)) | heads
    return Tables(inputs, heads or _shaped(others, tokens), rows)


def _accessors(places: Places, accessor: str) -> set[int]:
    """Return the ``id`` of each two-dimensional table that the modules' ``accessor`` methods return."""
    tables = set()
    classes = {cls for cls in set(map(type, places.modules)) if hasattr(cls, accessor)}
    for module in places.modules:
        if type(module) in classes:
            try:
                table = getattr(module, accessor)()
            except (NotImplementedError, AttributeError, TypeError):
                continue  # Hugging Face raises these where a model has no text
            weight = table if isinstance(table, nn.Parameter) else getattr(table, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim == 2:
                patches = accessor == "get_input_embeddings" and kind(table) not in ("embedding", "custom")
                if not patches:  # a vision model's "input embedding" is a linear layer over pixels
                    tables.add(id(weight))
    return tables


def _named(places: list[Place], rows: frozenset[int], *, known: bool) -> dict[int, str]:
    """Return the heads by name; where Hugging Face already gave a head, only by a name that leaves no doubt."""
    heads = {}
    for place in places:
        if place.inside and "lm_head" not in place.name:
            continue  # most parameters end here, so it is fast
        names = {place.label, place.prefix.rpartition(".")[2]}
        if not names.isdisjoint(_ALWAYS):
            where = ""
        elif not place.inside and not names.isdisjoint(_OUTSIDE):
            where = ", outside the repeated blocks"
        elif not place.inside and not known and place.label in _FITTING and _fits(place, rows):
            where = ", outside the repeated blocks, with an output for each row of the embedding"
        else:
            continue
        heads[id(place.parameter)] = f"named {place.label!r}{where}"
    return heads


def _fits(place: Place, rows: frozenset[int]) -> bool:
    outputs = fan(place, rows)[0]
    return any(count <= outputs < count + _PADDING for count in rows)


def _shaped(places: list[Place], tokens: dict[tuple[int, ...], int]) -> dict[int, str]:
    """Return the linear layers with the shape of the largest token table, outside the blocks and no deeper than it.

    A square table is no guide: many layers have its shape.
    """
    shape = max(tokens, default=(0, 0))
    fitting = (p for p in places if tuple(p.parameter.shape) == shape and shape[0] != shape[1])
    found = [p for p in fitting if not p.inside and len(p.path) <= tokens[shape] and kind(p.module) == "linear"]
    return {id(place.parameter): "of the embedding's shape, outside the repeated blocks" for place in found}


def fan(place: Place, rows: frozenset[int] = frozenset()) -> tuple[int, int]:
    """Return the true (fan_out, fan_in) of a matrix, however it is stored; ``rows``: the vocabularies' sizes."""
    first, second = place.parameter.shape[-2:]
    stored = kind(place.module)
    turned = stored == "conv1d" or getattr(place.module, "is_transposed", None) is True
    turned = turned or (stored == "custom" and first not in rows and second in rows)
    return (second, first) if turned else (first, second)
