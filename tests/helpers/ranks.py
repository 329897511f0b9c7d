"""Cases that run on several ranks: ``run_ranks`` starts ``python tests/helpers/ranks.py FOLDER MODULE`` in each.

A case is a function of the number of ranks that returns what the tests look at; what it raises is kept as text.
"""

import contextlib
import faulthandler
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def run_ranks(folder, size, module, *, timeout=150):
    """Run every case of a module in one launch of ``size`` processes; return {case: [answer of each rank]}."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "RANKS_TIMEOUT": str(timeout),
        "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS))),
    }  # fmt: skip
    command = [sys.executable, "-W", "error", str(Path(__file__)), str(folder), module]
    logs = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=log, stderr=log)
        for r, log in enumerate(logs)
    ]
    until = time.monotonic() + timeout
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
            time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
            rank.wait()
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read().decode())
            log.close()
    if codes != [0] * size:
        raise RuntimeError(f"ranks ended with {codes}:\n" + "\n".join(texts))
    import torch

    answers = [torch.load(Path(folder) / f"answers{r}.pt", weights_only=False) for r in range(size)]
    return {case: [answer[case] for answer in answers] for case in answers[0]}


def main(folder, module):
    """Run the cases of one module in this rank."""
    import importlib

    import torch

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(int(os.environ["RANKS_TIMEOUT"]) - 10)  # says where a rank hangs
    cases = importlib.import_module(module).CASES
    answers, rank, size = {}, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for case in cases:
        try:
            answers[case.__name__] = case(size, Path(folder))
        except Exception:
            answers[case.__name__] = traceback.format_exc()
    torch.save(answers, Path(folder) / f"answers{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
