"""A figure as files: PDF, SVG, PNG, its data as CSV, and its origin as JSON. The bytes are the same every time.

Two things would differ from one time to the next: dates and random ids, which matplotlib writes by default; see
https://reproducible-builds.org/docs/timestamps and matplotlib's ``svg.hashsalt``.
"""

from __future__ import annotations

import io
import json
import math
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure, SubFigure

from .files import reports_home, write_atomic

FORMATS = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}  # metadata to leave out
SAVING: Any = {  # of matplotlib.rcParams
    "pdf.fonttype": 42,  # TrueType, embedded: journals refuse Type 3
    "svg.fonttype": "path",  # looks the same where the font is missing
    "svg.hashsalt": "sandbox",  # ids in the SVG come from content, not from chance
    "savefig.bbox": None,  # exactly the size that was asked for
    "savefig.facecolor": "white",
    "savefig.edgecolor": "white",
    "savefig.transparent": False,
}
DPI = 300  # of the PNG; what journals ask of a figure in colour

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")


def save_figure(
    fig: Figure | SubFigure,
    name: str,
    *,
    records: Iterable[Any] = (),
    data: pd.DataFrame | None = None,
    folder: str | Path | None = None,
) -> dict[str, Path]:
    """Write a figure with its data and its origin, and return ``{"pdf": path, "svg": ..., "png": ..., ...}``.

    All files are ready before the first is written, and each appears whole or not at all, the JSON last. Without data,
    the CSV of an earlier figure of this name is removed. The same figure, data, records and machine give the same
    bytes.

    Args:
        fig: what a plot returned, as ``ax.figure``.
        name: the files' name, without an ending.
        records: the runs the figure shows (``RunRecord``, or their dicts); their order and repetitions do not matter.
        data: the table that was drawn; None writes no CSV.
        folder: for the files; None: ``records.files.reports_home()``, the project's ``reports/``.

    Raises:
        ValueError: the name is no plain file name, ``fig`` is no figure, or ``data`` no DataFrame.
    """
    ending = name.rpartition(".")[2] if isinstance(name, str) else ""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ending in {*FORMATS, "csv", "json"}:
        allowed = "letters, digits, '.', '_' and '-', without a folder and without an ending such as .pdf"
        raise ValueError(f"name={name!r} was given; allowed are {allowed}")
    if not isinstance(fig, Figure):
        raise ValueError(f"fig of type {type(fig).__name__} was given; allowed is a matplotlib Figure, as in ax.figure")
    if data is not None and not isinstance(data, pd.DataFrame):
        raise ValueError(f"data of type {type(data).__name__} was given; allowed is a pandas DataFrame or None")
    contents: dict[str, bytes] = _pictures(fig)
    if data is not None:
        contents["csv"] = data.to_csv(index=data.index.names != [None], lineterminator="\n").encode()
    origin = provenance(records)
    contents["json"] = (json.dumps({"figure": name} | origin, indent=1, allow_nan=False) + "\n").encode()
    folder = reports_home() if folder is None else Path(folder)
    paths = {ending: folder / f"{name}.{ending}" for ending in contents}
    if data is None:
        (folder / f"{name}.csv").unlink(missing_ok=True)
    for ending, content in contents.items():
        write_atomic(paths[ending], content)
    return paths


def _pictures(fig: Figure) -> dict[str, bytes]:
    """Return the figure in each format."""
    pictures = {}
    with matplotlib.rc_context(SAVING):
        for ending, metadata in FORMATS.items():
            for ax in fig.axes:  # the layout starts here; earlier drawing has moved the axes a little
                if (spec := ax.get_subplotspec()) is not None:
                    ax.set_subplotspec(spec)
            buffer = io.BytesIO()
            fig.savefig(buffer, format=ending, dpi=DPI, metadata=metadata)
            pictures[ending] = buffer.getvalue()
    return pictures


def provenance(records: Iterable[Any]) -> dict[str, Any]:
    """Return the origin of a figure as JSON values: versions that drew it, the runs' environment, and the runs.

    ``environment`` holds what all runs have in common (versions, git commit, corpus hash, device). What differs is with
    each run, beside its hash, status and full config. Dates are left out, and only the last part of an absolute path is
    kept: they say nothing about the numbers, and a path tells the reader about somebody's disk.
    """
    runs = {}
    for record in records:
        values = dict(record) if isinstance(record, Mapping) else record.to_dict()
        runs[str(values.get("hash", values.get("config_hash")))] = values
    worlds = {key: _undated(_portable(values.get("environment") or {})) for key, values in runs.items()}
    first = next(iter(worlds.values()), {})
    shared = {k: v for k, v in first.items() if all(k in w and w[k] == v for w in worlds.values())}
    return {
        "drawn_with": {
            "python": platform.python_version(),
            "matplotlib": matplotlib.__version__,
            "pandas": pd.__version__,
        },
        "environment": dict(sorted(shared.items())),
        "runs": [
            {
                "config_hash": key,
                "status": runs[key].get("status"),
                "environment": {k: v for k, v in sorted(worlds[key].items()) if k not in shared},
                "config": _portable(runs[key].get("config")),
            }
            for key in sorted(runs)
        ],
    }


def _portable(value: Any) -> Any:
    """Return strict JSON values with absolute paths cut to their last part; a number that is not finite is None."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(k): _portable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str | Path):
        for path in (PurePosixPath(value), PureWindowsPath(value)):
            if path.is_absolute() or path.parts[:1] == ("~",):
                return path.name
        return str(value)
    return value


def _undated(environment: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in environment.items() if not (isinstance(v, str) and _DATE.fullmatch(v))}
