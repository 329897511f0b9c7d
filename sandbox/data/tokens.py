"""Corpus -> ``Tokens``: a text as ids in two splits, computed once and kept in the user's cache directory."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

from ..config import DataConfig
from . import corpus, shards
from .tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer, train_bpe

Ids = np.ndarray | shards.Shards  # 1-D, uint16 or wider


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """A corpus as ids, in two splits. Read-only."""

    train: Ids
    val: Ids
    vocab_size: int  # number of ids; for .bin shards the largest id found, plus 1
    bytes_per_token: float  # bytes of UTF-8 per token, over the validation split; NaN for .bin shards
    corpus_hash: str  # sha256 of the corpus; for .bin shards see shards.survey
    tokenizer_hash: str  # sha256 of the tokenizer's pieces; "" for .bin shards
    tokenizer: Tokenizer | None  # None for .bin shards

    def encode(self, text: str) -> np.ndarray:
        """Return ``text`` as a 1-D array of ids, without loss.

        Raises:
            ValueError: .bin shards come without a tokenizer.
        """
        return self._tokenizer().encode(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that ``ids`` (1-D: list, array or tensor) stand for; U+FFFD where they cut a character.

        Raises:
            ValueError: an id beyond the vocabulary, or .bin shards, which come without a tokenizer.
        """
        return self._tokenizer().decode(ids).decode(errors="replace")

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(".bin shards are tokens already: the tokenizer that made them is not known here")
        return self.tokenizer


def load(config: DataConfig) -> Tokens:
    """Return the corpus of ``config`` as tokens; the same object again until one of its files changes.

    Raises:
        FileNotFoundError: there is no such corpus or path.
        ValueError: bad text or bad shards; the message names the file and the fault.
    """
    paths = shards.find(config.corpus) if config.corpus not in corpus.NAMED else []
    stamps = tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths or corpus.files(config.corpus))
    return _load(config, stamps, bool(paths))


@functools.lru_cache(maxsize=8)
def _load(config: DataConfig, stamps: tuple[tuple[str, int, int], ...], binary: bool) -> Tokens:
    if not binary:
        return _load_text(config)
    paths = [Path(name) for name, _, _ in stamps]
    train, val = shards.open_split(paths, "train"), shards.open_split(paths, "val")
    largest, corpus_hash = shards.survey(paths)
    return Tokens(
        train=train,
        val=val,
        vocab_size=largest + 1,
        bytes_per_token=math.nan,
        corpus_hash=corpus_hash,
        tokenizer_hash="",
        tokenizer=None,
    )


def _load_text(config: DataConfig) -> Tokens:
    text = corpus.read(config.corpus)
    corpus_hash = _sha256(text).hex()
    train, val = corpus.split(text)
    if not train:
        raise ValueError(f"corpus {config.corpus!r} has {len(text)} bytes; needed are more than {corpus.BLOCK}")
    if config.tokenizer == "bytes":
        tokenizer = byte_tokenizer()
        ids = {"train": tokenizer.encode(b"".join(train)), "val": tokenizer.encode(b"".join(val))}
    else:
        key = f"1 {corpus_hash} {config.tokenizer} {config.vocab_size} {sentencepiece.__version__}"
        ids = _cached(key, lambda: _tokenize(train, val, config.vocab_size))
        tokenizer = bpe_tokenizer(ids["model"].tobytes())
    for array in ids.values():
        array.flags.writeable = False
    return Tokens(
        train=ids["train"],
        val=ids["val"],
        vocab_size=len(tokenizer.pieces),
        bytes_per_token=sum(map(len, val)) / len(ids["val"]),
        corpus_hash=corpus_hash,
        tokenizer_hash=tokenizer.hash,
        tokenizer=tokenizer,
    )


def _tokenize(train: list[bytes], val: list[bytes], vocab_size: int) -> dict[str, np.ndarray]:
    model = train_bpe(b"".join(train), vocab_size)
    encode = bpe_tokenizer(model).encode
    ids = {"train": np.concatenate([*map(encode, train)]), "val": np.concatenate([*map(encode, val)])}
    return ids | {"model": np.frombuffer(model, np.uint8)}


def _cached(key: str, build: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return what ``build`` returns, from the user's cache directory if it is there.

    A file holds a sha256 and then an .npz; where the two do not fit, it is built again. Two processes may build at
    once: each writes its own file and renames it, and both files hold the same.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base, "dion-sandbox", f"{_sha256(key.encode()).hex()[:32]}.tokens")
    with contextlib.suppress(OSError):
        stored = path.read_bytes()
        if stored[:32] == _sha256(stored[32:]):
            return dict(np.load(io.BytesIO(stored[32:])))
    arrays, npz = build(), io.BytesIO()
    np.savez(npz, allow_pickle=False, **arrays)
    with contextlib.suppress(OSError):  # the cache only saves time, so a full or read-only disk stops nothing
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder, "new")
            new.write_bytes(_sha256(npz.getvalue()) + npz.getvalue())
            new.replace(path)
    return arrays


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
