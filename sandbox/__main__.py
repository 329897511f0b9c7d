"""The command line, for servers without a browser: ``python -m sandbox figures``, ``sweep``, ``table``, ``train``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from . import studies
from .records.files import reports_home
from .records.store import load_records, save_records
from .records.tables import table
from .studies import figures
from .sweeps.grids import read_spec
from .sweeps.sweeping import RETRIED, sweep
from .training.launcher import work
from .training.world import TIMEOUT


def make_figures(scale: studies.Preset, *, workers: int | None = None, keep: Path | None = None) -> None:
    """Run the studies at that scale, write their figures to ``reports/``, and print what was found.

    ``keep`` is a folder that gets the records of each study as one ``.jsonl`` file.
    """
    print(f"preset {scale.name}: {scale.steps} steps, {scale.seeds} seeds an arm", flush=True)
    head_rate, grouping = studies.head_rate(scale), studies.grouping(scale)
    rate_studies = [studies.embed_rate(scale), head_rate, studies.scalar_rate(scale)]
    sweeps = [*rate_studies, grouping]
    records = sweep([run for study in sweeps for run in study.runs], workers=workers)
    of = {}
    for study in sweeps:
        of[study.name], records = records[: len(study.runs)], records[len(study.runs) :]
    final = studies.scalar_opt(of["scalar-rate"], scale)
    of[final.name] = sweep(final.runs, workers=workers)

    for study in rate_studies:
        figures.rate_figure(study, of[study.name])
    figures.grouping_figure(grouping, of[grouping.name])
    figures.curves_figure(final, of[final.name])
    models, optimizer = studies.growing_models(), studies.base_optimizer()
    figures.groups_figure(models, optimizer, "groups", label="model.width")
    figures.shares_figure(models, optimizer, "shares")
    figures.overview_figure(head_rate, of[head_rate.name], models, optimizer)
    if keep is not None:
        for name, found in of.items():
            save_records(found, keep.resolve() / f"{name}.jsonl")

    tables = {
        "Best rates (nats/token on validation text, mean over n seeds)": pd.concat(
            [figures.findings(study, of[study.name]) for study in rate_studies]
        ),
        "Lion minus AdamW, each at its best shared rate, paired by seed (nats/token)": figures.verdict(of[final.name]),
        "ndim == 2 minus groups by role, each at its best base rate (nats/token)": figures.grouping_cost(
            of[grouping.name]
        ),
    }
    for title, rows in tables.items():
        print(f"\n{title}:\n{rows.to_string(index=False, float_format='{:.4g}'.format)}")
    print("\nFigures (PDF, SVG, PNG, CSV and provenance of each):")
    for path in sorted(reports_home().glob("*.png")):
        print(f"  {path}")


def run_spec(
    spec: Path, *, store: str = "runs", workers: int | None = None, retry: Sequence[str] = (), watch: bool = False
) -> int:
    """Run the sweep of a file, print its table, and return 1 where a run failed, else 0."""
    records = sweep(read_spec(spec), store=store, workers=workers, retry=retry, watch=watch)
    print(table(records).to_string(index=False))
    failed = [record for record in records if record.status == "failed"]
    for record in failed:
        print(f"\n{record.hash} failed:\n{record.error}", file=sys.stderr)
    return 1 if failed else 0


def print_table(store: str, *, csv: bool = False) -> None:
    """Print one row a run of a store."""
    found = table(load_records(store))
    print(found.to_csv(index=False) if csv else found.to_string(index=False), end="" if csv else "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("figures", help="run the studies and write their figures to reports/")
    command.add_argument("--preset", choices=list(studies.PRESETS), help="default: SANDBOX_PRESET, else quick")
    command.add_argument("--workers", type=int, help="processes; default: as many as there is room for")
    command.add_argument("--keep", type=Path, metavar="FOLDER", help="also write the records of each study to one file")
    command = commands.add_parser("sweep", help="train the runs of a JSON file that a store does not hold yet")
    command.add_argument("spec", type=Path, help='{"base": {...}, "axes": {"seed": [0, 1]}}, see notebook 05.00')
    command.add_argument("--store", default="runs", help="folder of runs; default: runs")
    command.add_argument("--workers", type=int, help="processes; default: as many as there is room for")
    command.add_argument("--retry", nargs="+", default=(), choices=RETRIED, help="statuses to run again")
    command.add_argument("--watch", action="store_true", help="a line for each run that ends")
    command = commands.add_parser("table", help="print one row a run of a store")
    command.add_argument("store", help="folder of runs, or a .jsonl file")
    command.add_argument("--csv", action="store_true", help="comma-separated values")
    command = commands.add_parser("train", help="train the run in a JSON file; on a mesh, under torchrun")
    command.add_argument("run", type=Path, help="RunConfig.to_dict() as JSON")
    command.add_argument("--out", type=Path, default=Path("runs"), help="folder of the record; default: runs")
    command.add_argument("--checkpoints", type=Path, help="folder; default: the run's own")
    command.add_argument("--wait", type=float, default=TIMEOUT, help="seconds that a rank waits for the others")
    command.add_argument("--watched", type=int, help=argparse.SUPPRESS)  # by the launcher with this process id
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 where a run of ``sweep`` failed, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    if options.command == "train":
        more = {"wait": options.wait, "checkpoints": options.checkpoints, "watched": options.watched}
        return work(options.run, options.out, **more)
    try:
        if options.command == "table":
            print_table(options.store, csv=options.csv)
        elif options.command == "sweep":
            given = {name: getattr(options, name) for name in ("store", "workers", "retry", "watch")}
            return run_spec(options.spec, **given)
        else:
            make_figures(studies.preset(options.preset), workers=options.workers, keep=options.keep)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; finished runs are kept, and the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
