"""What a sweep shows while it goes: one bar, and with ``watch`` a table and curves that update in place.

Outside a notebook ``watch`` writes one line for each run. The bar is written to a file only twice a minute.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from ..config import RunConfig
from ..records.record import RunRecord
from ..records.store import Store, report
from ..records.tables import varying

EVERY = 0.5  # seconds between two looks at what runs
EVERY_WATCHED = 2.0  # seconds between two drawings of table and curves
EVERY_IN_A_FILE = 30.0
CURVES = 12  # drawn at a time: of running runs first, then of the newest

_BAR = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"


def in_notebook() -> bool:
    """Return whether this is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class Display:
    """One bar for the runs of one sweep and, if asked for, a live view."""

    def __init__(
        self, runs: Mapping[str, RunConfig], records: Mapping[str, RunRecord], store: Store, *, bar: bool, watch: bool
    ) -> None:
        self.runs, self.store = runs, store
        self.records = dict(records)
        self.settings = varying([RunRecord(config=run, hash=name, status="interrupted") for name, run in runs.items()])
        self.start, self.known, self.last = time.monotonic(), len(records), -1e9
        self.running: dict[str, dict[str, Any]] = {}  # the last progress of each
        self.new_tokens = 0
        self.live = _Live() if watch and in_notebook() else None
        self.lines = watch and self.live is None
        quiet = not (in_notebook() or sys.stderr.isatty())
        self.every = EVERY_IN_A_FILE if quiet else EVERY
        self.bar = tqdm(total=len(runs), initial=self.known, smoothing=0, bar_format=_BAR, disable=not bar, leave=True)

    def ended(self, record: RunRecord) -> None:
        """Show that a run ended."""
        self.records[record.hash] = record
        self.running.pop(record.hash, None)
        self.new_tokens += int(max(record.curve.get("tokens") or [0]))
        if self.lines:
            values = self.settings.iloc[list(self.runs).index(record.hash)].dropna()
            settings = ", ".join(f"{name}={value}" for name, value in values.items())
            report(f"{record.hash} {record.status}, {record.val_loss:.4f} nats/token, {settings}")

    def tick(self, running: Iterable[str]) -> None:
        """Look at the running runs and show how far they are; do nothing soon after the last time."""
        now = time.monotonic()
        if now - self.last < self.every:
            return
        self.last = now
        self.running = {name: self.store.progress(name) for name in running}
        self._show_bar()
        if self.live is not None:
            self.live.show(self)

    def close(self) -> None:
        """Show the end and leave the bar as it is."""
        self.running = {}
        self._show_bar()
        if self.live is not None:
            self.live.show(self, last=True)
        self.bar.close()

    def _show_bar(self) -> None:
        parts = [self.running[name].get("step", 0) / self.runs[name].steps for name in self.running]
        failed = sum(record.status in ("failed", "diverged") for record in self.records.values())
        tokens = self.new_tokens + sum(progress.get("tokens", 0) for progress in self.running.values())
        rate = tokens / max(time.monotonic() - self.start, 1e-9)
        self.bar.n = min(len(self.records) + sum(parts), len(self.runs))
        self.bar.set_description_str(
            f"{len(self.records)}/{len(self.runs)} done, {len(self.running)} running, {failed} failed or diverged, "
            f"{rate:,.0f} tokens/s",
            refresh=False,
        )
        self.bar.refresh()

    def table(self) -> pd.DataFrame:
        """Return one row a run, in the order asked for: status, step, losses in nats/token, then what varies."""
        rows = []
        for name, run in self.runs.items():
            record, progress = self.records.get(name), self.running.get(name, {})
            curve = record.curve if record is not None else progress.get("curve", {})
            waiting = "running" if name in self.running else "queued"
            rows.append(
                {
                    "status": record.status if record is not None else waiting,
                    "step": f"{(curve.get('step') or [0])[-1]:.0f}/{run.steps}",
                    "train_loss": (curve.get("train_loss") or [None])[-1],
                    "val_loss": record.val_loss if record is not None else None,
                }
            )
        return pd.DataFrame(rows).join(self.settings)

    def curves(self) -> dict[str, dict[str, list[float]]]:
        """Return columns step and train_loss by hash: of what runs, then of what ended last."""
        found = {name: progress.get("curve", {}) for name, progress in self.running.items()}
        found |= {name: record.curve for name, record in reversed(self.records.items()) if name not in found}
        return dict([(name, curve) for name, curve in found.items() if curve.get("step")][:CURVES])


class _Live:
    """A table and a figure in a notebook's output, updated in place."""

    def __init__(self) -> None:
        from IPython.display import display

        self.table = display("", display_id=True)
        self.figure = display("", display_id=True)
        self.last = -1e9

    def show(self, what: Display, *, last: bool = False) -> None:
        """Draw both again, unless that was done just now."""
        from IPython.display import Image

        now = time.monotonic()
        if now - self.last < EVERY_WATCHED and not last:
            return
        self.last = now
        self.table.update(what.table())
        if curves := what.curves():
            self.figure.update(Image(_draw(curves, what.running)))


def _draw(curves: Mapping[str, dict[str, list[float]]], running: Iterable[str]) -> bytes:
    """Return a PNG of training losses, those of runs under way in colour; pyplot's figures are left alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for name, curve in curves.items():
        under_way = name in running
        ax.plot(
            curve["step"], curve["train_loss"], color=None if under_way else "0.7", label=name if under_way else None
        )
    ax.set(xlabel="step", ylabel="training loss (nats/token)")
    if any(name in running for name in curves):
        ax.legend(frameon=False, fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()
