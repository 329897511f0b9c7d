"""Where files go, and how they are written so that they appear whole or not at all.

Relative stores and report folders are under ``home()``, so a kernel that starts anywhere writes to one place.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the folder of this package: the checkout, or site-packages


def record_path(folder: Path, name: str) -> Path:
    """Return where the record of the run with that hash lies in a store."""
    return folder / name / "record.json"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all; its folder is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def home() -> Path:
    """Return the folder that holds ``runs/`` and ``reports/``.

    ``SANDBOX_HOME`` if it is set. At smoke scale a temporary folder, which is removed when the process ends. Otherwise
    the checkout that this package is in, or the working directory without one.
    """
    if os.environ.get("SANDBOX_HOME"):
        return Path(os.environ["SANDBOX_HOME"]).expanduser().resolve()
    if os.environ.get("SANDBOX_PRESET") == "smoke":
        return _scratch()
    return ROOT if (ROOT / "pyproject.toml").is_file() else Path.cwd()


@functools.cache
def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="dion-sandbox-smoke-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def reports_home() -> Path:
    """Return the folder for figures."""
    return home() / "reports"
