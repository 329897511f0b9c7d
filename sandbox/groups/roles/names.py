"""What a parameter's name says about its purpose. Whole words of dotted names count, never substrings."""

from __future__ import annotations

from typing import Literal

from .sites import Place, words

# fmt: off
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
_POSITION_WORDS = frozenset({
    "pos", "position", "positions", "positional", "wpe", "pe", "type", "types", "segment", "relative", "rel", "time",
    "latent", "latents", "query", "queries", "registers", "prompt", "cls",
})
# fmt: on


def meaning(place: Place) -> Literal["vector", "table", "map", ""]:
    """Return what a parameter is by its name; "" where the name says nothing.

    The last word counts most: ``relative_position_bias_table`` is a table, ``pos_bias_u`` a bias, ``token_proj`` a map.
    """
    found = words(place.label)
    purpose = found[:-1] if found[-1:] == ("weight",) or found[-1:] == ("weights",) else found
    last = purpose[-1] if purpose else ""
    if last in _TABLE_WORDS:
        return "table"
    if last in _VECTOR_WORDS or "bias" in found or (place.local == "D" and hasattr(place.module, "A_log")):
        return "vector"  # A_log and D: https://arxiv.org/abs/2312.00752, section 3.6
    if last in _MAP_WORDS:
        return "map"
    own = place.local != "weight"  # in a module's name (``token_mixer.weight``) only the last word says what it holds
    return "table" if own and not _TABLE_WORDS.isdisjoint(purpose) else ""


def positional(place: Place) -> bool:
    """Return whether a table holds positions, segments or the like, and not a vocabulary."""
    return not _POSITION_WORDS.isdisjoint(words(place.label))
