"""The native optimizers retrace upstream's trajectories (tests/golden/README.md says where the numbers come from)."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sandbox import optim

FILE = Path(__file__).parent / "golden" / "upstream_trajectories.npz"
MATRICES = ("m0", "m1", "m2", "m3")
# Upstream rounds the input of the orthogonalization to bfloat16 (exact) or iterates in it (polar_express); we do not.
TOLERANCE = {"exact": 1e-4, "exact, cautious": 4e-4, "polar_express": 3e-3, "qr": 1e-6, "scalar": 1e-6}


@functools.cache
def golden():
    with np.load(FILE) as file:
        return {name: file[name] for name in file.files}


def cases():
    with np.load(FILE) as file:
        return [c for c in json.loads(str(file["meta"])) if hasattr(optim, c["optimizer"])]


def exact_polar(matrices, epsilon):
    u, _, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    return (u @ vh).to(matrices.dtype)


def groups_of(case, parameters):
    for number, group in enumerate(case["groups"]):
        extra = (
            {}
            if number == 0
            else {"algorithm": case["scalar_opt"], "betas": case["scalar_betas"], "eps": case["scalar_eps"]}
        )
        yield {**group, **extra, "params": [parameters[name] for name in group["params"]]}


def build(case, parameters):
    kwargs = dict(case["kwargs"])
    if case["orthogonalize"] == "exact":
        kwargs["newton_schulz_func"] = exact_polar
    return getattr(optim, case["optimizer"])(list(groups_of(case, parameters)), lr=case["lr"], **kwargs)


@pytest.mark.parametrize(
    "case", cases(), ids=lambda c: f"{c['case']}-{c['optimizer']}-{c['scalar_opt']}-{c['orthogonalize']}"
)
def test_upstream_trajectory_is_retraced(case):
    numbers = golden()
    names = [name for group in case["groups"] for name in group["params"]]
    parameters = {name: torch.nn.Parameter(torch.from_numpy(numbers[f"init/{name}"].copy())) for name in names}
    optimizer = build(case, parameters)
    for name in names:
        if (first := f"{case['case']}/Q0/{name}") in numbers:
            optimizer.state[parameters[name]]["Q"].copy_(torch.from_numpy(numbers[first]))
    for step in range(1, case["steps"] + 1):
        for name, p in parameters.items():
            p.grad = torch.from_numpy(numbers[f"grad{step}/{name}"].copy())
        optimizer.step()
        for name, p in parameters.items():
            kind = case["orthogonalize"] if name in MATRICES else "scalar"
            kind += ", cautious" if kind == "exact" and case["kwargs"].get("cautious_wd") else ""
            expected = torch.from_numpy(numbers[f"{case['case']}/after{step}/{name}"])
            torch.testing.assert_close(
                p.data, expected, atol=TOLERANCE[kind], rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
