"""What the tests of sweeps share: optimizers that misbehave, by importable name, and what has to be equal."""

import json
import time
from pathlib import Path

import torch

KEPT = ("curve", "evaluations", "rms", "groups", "config", "hash", "status")


def same(record):
    """Return, as text, all of a record that does not depend on when and by which worker it was made."""
    return json.dumps({key: record.to_dict()[key] for key in KEPT})


def raising(model, lr):
    """Fail as code does."""
    raise KeyError("no such thing")


def hungry(model, lr):
    """Ask for 8 GiB where 64 MiB are left."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, limits[1]))
    try:
        torch.zeros(2**31)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def noting(model, lr, log, name, first_pause=0.0):
    """Note in a file that a run was begun; the first time, take long."""
    first = not Path(log).exists()
    with open(log, "a", encoding="utf-8") as file:  # one short write: lines of several processes do not mix
        file.write(f"{name}\n")
    if first:
        time.sleep(first_pause)
    return torch.optim.SGD(model.parameters(), lr=lr)
