"""Runs launched from one process on two: the same curve, errors with their text, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

import sandbox as sb
from sandbox.records.record import RunRecord
from sandbox.training.launcher import LaunchFailed

TIME = 120  # seconds, for a machine under load; a launch takes about 10


def ranks():
    """Return the process ids of all ranks that run now, by reading what the kernel knows."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().split(b"\0")
            with open(f"/proc/{pid}/environ", "rb") as file:
                ours = f"SANDBOX_TEST={os.getpid()}".encode() in file.read().split(b"\0")
        except OSError:
            continue
        if ours and b"--watched" in command and b"torch.distributed.run" not in command:
            found.append(int(pid))
    return sorted(found)


@pytest.fixture
def run(tiny, monkeypatch):
    """A run for two ranks; whatever it leaves behind fails the test."""
    if not os.path.isdir("/proc/self"):
        pytest.skip("what is left behind is read from /proc, which only Linux has")
    monkeypatch.setenv("SANDBOX_TEST", str(os.getpid()))
    yield replace(tiny, steps=6)
    until = time.monotonic() + 10
    while ranks() and time.monotonic() < until:
        time.sleep(0.1)
    assert ranks() == []


def at_step(step, act):
    """Return an observer that acts once, at a step."""
    return lambda row: act() if row["step"] == step else None


def test_a_launch_returns_the_record_of_the_run_and_shows_its_steps(run):
    rows = []
    record = sb.launch(run, 2, timeout=TIME, on_step=rows.append, progress=False)
    assert record.status == "finished"
    assert record.environment["ranks"] == 2
    assert record.config.mesh == sb.MeshConfig(dp_shard=2)
    assert record.curve["train_loss"] == pytest.approx(sb.train(run).curve["train_loss"], abs=1e-5)
    assert [row["train_loss"] for row in rows] == record.curve["train_loss"]


def test_the_error_of_a_rank_is_in_the_exception(run):
    with pytest.raises(LaunchFailed, match=r"(?s)of 2 failed.*batch_size=3 was given for 2 ranks"):
        sb.launch(replace(run, batch_size=3), 2, timeout=TIME, progress=False)


def test_a_killed_rank_is_an_error_that_names_it(run):
    endless = replace(run, steps=10**6, eval_every=10**6)
    with pytest.raises(LaunchFailed, match=r"took no part|torchrun ended"):
        sb.launch(
            endless, 2, timeout=TIME, progress=False, on_step=at_step(3, lambda: os.kill(ranks()[-1], signal.SIGKILL))
        )


def test_a_hung_rank_is_named_within_the_wait(run):
    endless = replace(run, steps=10**6, eval_every=10**6)
    start = []

    def hang():
        start.append(time.monotonic())
        os.kill(ranks()[-1], signal.SIGSTOP)

    with pytest.raises(LaunchFailed, match="took no part"):
        sb.launch(endless, 2, timeout=TIME, wait=5, progress=False, on_step=at_step(3, hang))
    assert time.monotonic() - start[0] < 60


def test_time_out_and_ctrl_c_end_everything(run):
    endless = replace(run, steps=10**6, eval_every=10**6)
    with pytest.raises(LaunchFailed, match="longer than timeout=1 s"):
        sb.launch(endless, 2, timeout=1, progress=False)
    interrupt = at_step(2, lambda: signal.raise_signal(signal.SIGINT))
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        sb.launch(endless, 2, timeout=TIME, progress=False, on_step=interrupt)


def test_a_mesh_for_another_number_of_ranks_is_refused(run):
    with pytest.raises(ValueError, match="nproc=2 was given for a mesh of 3 ranks"):
        sb.launch(replace(run, mesh=sb.MeshConfig(dp_shard=3)), 2)


def test_a_run_for_several_ranks_in_one_process_says_what_to_do(run):
    with pytest.raises(ValueError, match=r"in a world of 1.*sandbox\.launch"):
        sb.train(replace(run, mesh=sb.MeshConfig(dp_shard=2)))


def test_two_torchruns_on_the_loopback_stand_in_for_two_machines(run, tmp_path):
    import json
    import socket

    on_two = replace(run, mesh=sb.MeshConfig(dp_replicate=2)).resolved()
    (tmp_path / "run.json").write_text(json.dumps(on_two.to_dict()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = os.path.dirname(os.path.dirname(sb.__file__))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0"]
    command += ["--rdzv-backend=static", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=7"]
    agents = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", "-m", "sandbox", "train", "run.json", "--out", "out"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": root},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for node in range(2)
    ]
    try:
        told = [agent.communicate(timeout=TIME)[1].decode() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], told
    (written,) = (tmp_path / "out").rglob("*.*")
    record = RunRecord.load(written)
    assert record.curve["train_loss"] == pytest.approx(sb.train(run).curve["train_loss"], abs=1e-5)


def test_a_sweep_launches_what_needs_several_ranks(tiny, tmp_path):
    """One rank and two ranks side by side in one store; the same curve within round-off."""
    two = replace(tiny, mesh=sb.MeshConfig(dp_shard=2))
    alone, sharded = sb.sweep([tiny, two], store=tmp_path, progress=False)
    assert (alone.status, sharded.status) == ("finished", "finished"), sharded.error
    assert sharded.environment["ranks"] == 2
    assert sharded.curve["train_loss"] == pytest.approx(alone.curve["train_loss"], abs=1e-5)
    assert {record.hash for record in sb.load_records(tmp_path)} == {tiny.hash, two.hash}
