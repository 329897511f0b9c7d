"""What sweeps cost: sixteen runs in two slots against one process, warm workers' overhead a run, a table of 1,000 runs.

The issue's bounds: at most 0.65 of the serial time on two cores, under 50 ms a run, under 2 s. `make bench` shows the
times; ratios and overheads are in `extra_info`. Without timings on, small versions only show that all this runs.
"""

import itertools
import time
from dataclasses import replace

import pytest

import sandbox as sb
from sandbox.records.record import RunRecord
from sandbox.sweeps import executors
from sandbox.sweeps.executors import slot_environments

needs_two_cores = pytest.mark.skipif(
    len(slot_environments([sb.RunConfig(device="cpu")])) < 2, reason="one core is one slot: nothing runs in parallel"
)


@pytest.fixture
def small(tmp_path):
    """A run of a few dozen milliseconds."""
    text = tmp_path / "numbers.txt"
    text.write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(4000)))
    return sb.RunConfig(
        model=sb.ModelConfig(vocab_size=256, width=16, depth=1, heads=2, context=16),
        data=sb.DataConfig(corpus=str(text), tokenizer="bytes"),
        steps=5,
        batch_size=4,
        device="cpu",
        eval_tokens=64,
    )


def seconds(function, *arguments, **options):
    start = time.perf_counter()
    result = function(*arguments, **options)
    return time.perf_counter() - start, result


@needs_two_cores
def test_sixteen_runs_in_two_slots(benchmark, small, tmp_path):
    timed, stores = benchmark.enabled, itertools.count()
    run = replace(small, model=replace(small.model, width=64, depth=2), steps=400 if timed else 2, eval_every=1000)
    runs = [replace(run, seed=i) for i in range(16)]

    def slots():
        executors.close_idle()  # what starting them costs is part of it
        return sb.sweep(runs, store=tmp_path / str(next(stores)), workers=2, progress=False)

    serial, _ = seconds(sb.sweep, runs, store=tmp_path / "serial", workers=1, progress=False)
    parallel, records = seconds(slots)
    benchmark.pedantic(slots, rounds=1)
    executors.close_idle()
    benchmark.extra_info |= {"serial_s": serial, "ratio": parallel / serial}
    assert [r.status for r in records] == ["finished"] * 16


@needs_two_cores
def test_what_a_warm_worker_adds_to_a_run(benchmark, small, tmp_path):
    stores = itertools.count()
    count = 32 if benchmark.enabled else 2
    runs = [replace(small, seed=i) for i in range(count)]

    def slots():
        return sb.sweep(runs, store=tmp_path / str(next(stores)), workers=2, progress=False)

    slots()  # starts the workers
    wall, records = seconds(slots)
    benchmark.pedantic(slots, rounds=3)
    executors.close_idle()
    inside = sum(record.timing["seconds"] for record in records)
    benchmark.extra_info["overhead_ms_a_run"] = 1e3 * (2 * wall - inside) / count  # two slots: twice the time
    assert len(records) == count


def test_a_thousand_runs_into_a_table(benchmark, tmp_path):
    count, steps = 1000 if benchmark.enabled else 20, list(range(1, 201))
    base = sb.RunConfig(device="cpu", dtype="float32", context=8)
    for seed in range(count):
        run = replace(base, seed=seed).resolved()
        RunRecord(
            config=run,
            hash=run.hash,
            status="finished",
            curve={"step": steps, "tokens": steps, "train_loss": [3.14159] * 200, "factor": [1.0] * 200},
            evaluations={"step": [200], "val_loss": [1.5], "val_bpb": [2.1]},
        ).save(tmp_path)
    table = benchmark(lambda: sb.table(sb.load_records(tmp_path)))
    assert len(table) == count
