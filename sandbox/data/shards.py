"""Folders of ``.bin`` shards, which hold tokens: memory-mapped, each split read as one long sequence.

The layout is that of llm.c and modded-nanogpt (https://github.com/karpathy/llm.c/tree/master/dev/data), so a FineWeb
download works unchanged: 256 int32 (magic 20240520, version 1, number of tokens, zeros), then the tokens as uint16,
all little-endian.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MAGIC, VERSION = 20240520, 1
_HEADER = 4 * 256  # bytes
_LOOK, _LOOKS = 2**16, 64  # tokens of a sample, samples of a shard


class Shards:
    """Several arrays that read as one, by ``len`` and by slices of step 1. A slice is a copy and may cross arrays."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        """Take the ``parts`` in their order."""
        self.parts = tuple(parts)
        self.ends = tuple(itertools.accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.ends[-1]

    def __getitem__(self, window: slice) -> np.ndarray:
        """Return the tokens of ``window`` as one array."""
        start, stop, step = window.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of step {step} was given; allowed is 1")
        found = [self.parts[0][:0]]
        for part, end in zip(self.parts, self.ends, strict=True):
            begin = end - len(part)
            if start < end and begin < stop:
                found.append(part[max(start - begin, 0) : stop - begin])
        return np.concatenate(found)


def find(name: str) -> list[Path]:
    """Return the ``.bin`` files at the path ``name`` in order; none if it is a text corpus."""
    root = Path(name).expanduser().absolute()
    return [root] if root.suffix == ".bin" and root.is_file() else sorted(root.glob("*.bin"))


def open_split(paths: Sequence[Path], split: str) -> Shards:
    """Return the tokens of all shards whose names contain ``_train_`` or ``_val_``, as ``split`` says.

    Raises:
        ValueError: there are none, or one is of another format, truncated or empty.
    """
    parts = [open_shard(path) for path in paths if f"_{split}_" in path.name]
    if not parts:
        raise ValueError(f"no *_{split}_*.bin among {', '.join(path.name for path in paths)}: give the folder of both")
    return Shards(parts)


def open_shard(path: Path) -> np.ndarray:
    """Return the tokens of one shard, memory-mapped.

    Raises:
        ValueError: it is of another format, truncated or empty.
    """
    header = np.fromfile(path, "<i4", count=3)
    if len(header) < 3 or tuple(header[:2]) != (MAGIC, VERSION):
        raise ValueError(f"{path} is no shard: its header must begin with {MAGIC}, {VERSION}; found: {header.tolist()}")
    size, needed = path.stat().st_size, _HEADER + 2 * int(header[2])
    if size != needed or header[2] <= 0:
        raise ValueError(f"{path} has {size} bytes; its header promises {header[2]} tokens, that is {needed} bytes")
    return np.memmap(path, "<u2", mode="r", offset=_HEADER, shape=(int(header[2]),))


def survey(paths: Sequence[Path]) -> tuple[int, str]:
    """Return the largest id found, and a sha256 over names, sizes and the tokens looked at.

    A shard of up to 4,194,304 tokens is read whole. A longer one is cut into 64 parts, and the first 65,536 tokens of
    each part are read.
    """
    largest, digest = 0, hashlib.sha256()
    for path in paths:
        tokens = open_shard(path)
        digest.update(f"{path.name} {len(tokens)}\n".encode())
        stride = max(_LOOK, len(tokens) // _LOOKS)
        for start in range(0, len(tokens), stride):
            look = tokens[start : start + _LOOK]
            largest = max(largest, int(look.max()))
            digest.update(look.tobytes())
    return largest, digest.hexdigest()
