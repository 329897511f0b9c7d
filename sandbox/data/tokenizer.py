"""Bytes to ids and back: single bytes, or byte-pair encoding trained by sentencepiece.

Sentencepiece sees one ordinary character for each of the 256 bytes, all of them in its vocabulary (the idea of GPT-2's
byte-level BPE, https://cdn.openai.com/better-language-models/language_models.pdf section 2.2). So nothing is unknown,
and what sentencepiece treats specially (newlines, NUL, its own U+2581 for a space, ``<unk>``) never reaches it. Every
text is encoded without loss, and all other ids are merges.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import sentencepiece

_ALPHABET = "".join(chr(byte) if 0x20 <= byte < 0x7F else chr(0x100 + byte) for byte in range(256))
_BYTE = {character: byte for byte, character in enumerate(_ALPHABET)} | {"\u2581": 0x20}
_NEWLINE = _ALPHABET[ord("\n")]
# A piece ends at a newline, so text can be encoded in blocks. Sentencepiece aborts on words of 65,536 characters.
_SENTENCE = re.compile(f"[^{_NEWLINE}]{{0,4096}}{_NEWLINE}|[^{_NEWLINE}]{{1,4096}}")
_UNKNOWN = "\u2400"  # sentencepiece needs such a piece; it is outside the alphabet, so no text holds it


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer over bytes. ``pieces[i]`` are the bytes of id ``i``; ``encode`` returns a 1-D array of ids."""

    pieces: tuple[bytes, ...]
    encode: Callable[[bytes], np.ndarray]

    def decode(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that ``ids`` (1-D: list, array or tensor) stand for.

        Raises:
            ValueError: an id beyond the vocabulary.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        for i in ids:
            if not 0 <= i < len(self.pieces):
                raise ValueError(f"id {i} was given; allowed is from 0 to {len(self.pieces) - 1}")
        return b"".join(self.pieces[i] for i in ids)

    @property
    def hash(self) -> str:
        """The sha256 of all pieces in their order, 64 hex digits."""
        return hashlib.sha256(repr(self.pieces).encode()).hexdigest()


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose 256 ids are the bytes themselves."""
    return Tokenizer(
        pieces=tuple(bytes([byte]) for byte in range(256)),
        encode=lambda text: np.frombuffer(text, np.uint8).astype(np.uint16),
    )


def bpe_tokenizer(model: bytes) -> Tokenizer:
    """Return the tokenizer of a model from ``train_bpe``. The unknown id, which is never encoded, decodes to U+FFFD."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    names = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    dtype = np.uint16 if len(names) <= 2**16 else np.uint32
    return Tokenizer(
        pieces=tuple("\ufffd".encode() if n == _UNKNOWN else bytes(_BYTE[c] for c in n) for n in names),
        encode=lambda text: np.array(processor.encode(_spell(text)), dtype),
    )


def train_bpe(text: bytes, vocab_size: int) -> bytes:
    """Return a sentencepiece model with at most ``vocab_size`` ids (fewer where ``text`` has no more pairs to merge).

    The same bytes give the same model. ``vocab_size`` is at least 257: the bytes and the unknown id. Options:
    https://github.com/google/sentencepiece/blob/master/doc/options.md
    """
    model = io.BytesIO()
    # Each character stands once as a sentence of its own: it makes no pair, but it is seen. In a long text it stands
    # more often, since the trainer adds up shares of it in float32 (24 bits), where one part in 2^22 still counts.
    alphabet = list(_ALPHABET) * (1 + len(text) // 2**22)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=itertools.chain(alphabet, (match.group() for match in _SENTENCE.finditer(_spell(text)))),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,  # of the alphabet
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,  # indentation
        split_by_unicode_script=False,  # the characters stand for bytes, their scripts mean nothing
        max_sentence_length=4 * 4096,  # bytes; longer ones would be skipped
        num_threads=1,
        minloglevel=2,  # errors only
        unk_piece=_UNKNOWN,
        bos_id=-1,
        eos_id=-1,
    )
    return model.getvalue()


def _spell(text: bytes) -> str:
    return text.decode("latin-1").translate(_ALPHABET)
