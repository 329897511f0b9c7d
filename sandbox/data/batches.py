"""Tokens -> batches. A batch is a pure function of seed and step, so every arm of an ablation sees the same text."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..config import DataConfig
from .tokens import Ids, Tokens, load

Batch = tuple[torch.Tensor, torch.Tensor]  # x_BT and y_BT, int64


def check(source: DataConfig | Tokens, *, vocab_size: int, context: int) -> Tokens:
    """Return the tokens of ``source``, checked: a model of ``vocab_size`` and ``context`` can be trained on them.

    Raises:
        FileNotFoundError: as ``load``.
        ValueError: as ``load``; the model's vocabulary is too small; a split is shorter than one window.
    """
    tokens = source if isinstance(source, Tokens) else load(source)
    if tokens.vocab_size > vocab_size:
        raise ValueError(
            f"the model's vocab_size={vocab_size} was given for tokens with ids from 0 to {tokens.vocab_size - 1}; "
            f"allowed is at least {tokens.vocab_size}"
        )
    _windows(tokens.train, context, "the training split")
    _windows(tokens.val, context, "the validation split")
    return tokens


def batch(tokens: Tokens | Ids, data_seed: int, step: int, batch_size: int, context: int) -> Batch:
    """Return ``(x_BT, y_BT)``, int64, y one token ahead of x: windows drawn uniformly from the training split.

    A pure function of its arguments. A window may cross from one block of the split, or one shard, into the next.

    Raises:
        ValueError: the split is shorter than a window, that is ``context`` + 1 tokens.
    """
    ids = tokens.train if isinstance(tokens, Tokens) else tokens
    last = len(ids) - context
    _windows(ids, context, "the training split")
    return _cut(ids, np.random.default_rng([data_seed, step]).integers(last, size=batch_size).tolist(), context)


def validation_batches(tokens: Tokens | Ids, batch_size: int, context: int, eval_tokens: int) -> list[Batch]:
    """Return whole batches ``(x_BT, y_BT)``, as ``batch`` does, of windows spread evenly over the validation split.

    ``eval_tokens`` is rounded up to whole batches, and down to what the split has. Windows do not overlap, except that
    the last token of a y may be the first of the next x.

    Raises:
        ValueError: the split has fewer windows than one batch.
    """
    ids = tokens.val if isinstance(tokens, Tokens) else tokens
    windows = _windows(ids, context, "the validation split")
    batches = min(math.ceil(eval_tokens / (batch_size * context)), windows // batch_size)
    if not batches:
        raise ValueError(
            f"the validation split has {windows} windows of {context} tokens, batch_size={batch_size} was given "
            f"with eval_tokens={eval_tokens}; allowed is a batch_size of at most {windows}"
        )
    count = batches * batch_size
    starts = [i * windows // count * context for i in range(count)]
    return [_cut(ids, starts[i : i + batch_size], context) for i in range(0, count, batch_size)]


def _windows(ids: Ids, context: int, what: str) -> int:
    count = (len(ids) - 1) // context
    if count < 1:
        raise ValueError(f"{what} has {len(ids)} tokens; context={context} needs at least {context + 1}")
    return count


def _cut(ids: Ids, starts: list[int], context: int) -> Batch:
    cut = np.stack([ids[start : start + context + 1] for start in starts]).astype(np.int64)
    return torch.from_numpy(cut[:, :-1].copy()), torch.from_numpy(cut[:, 1:].copy())
