"""Every causal language model that transformers builds from its default configuration, grouped and judged.

``make zoo`` prints a table of all and fails on any parameter whose role breaks an invariant. Models are built on the
meta device, whole, and nothing is downloaded. The judge knows torch's and transformers' classes alone and shares no
code with ``sandbox.roles``: an input embedding is ``embed``; an output embedding ``lm_head``, or ``embed`` where it is
tied; a two-dimensional weight of any other linear layer ``matrix``; of a convolution ``vector``; fewer than two
dimensions ``vector``; every trainable parameter is in one group, once.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import collections
import sys
import time
import warnings

import pandas as pd
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MODELS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS
from transformers.pytorch_utils import Conv1D

from sandbox.config import MuonConfig
from sandbox.groups.builder import build_dion_optimizer

FEWEST = 100  # architectures; with fewer something is wrong with the installation


def build(kind):
    """Return the model of a kind from its default configuration, or the reason why transformers does not build it."""
    try:
        config = CONFIG_MAPPING[kind]()
        with torch.device("meta"):
            return MODELS[type(config)](config), None
    except Exception as error:  # whatever it is, it is transformers' own
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def expected_roles(model):
    """Return the role that the invariants ask for, by ``id``; what they say nothing about is left out."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    embeddings.append(getattr(model.get_input_embeddings(), "weight", None))
    roles = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter.ndim < 2:
                roles[id(parameter)] = "vector"
            elif isinstance(module, nn.Linear | Conv1D) and name == "weight" and parameter.ndim == 2:
                roles.setdefault(id(parameter), "matrix")
            elif isinstance(module, nn.modules.conv._ConvNd):
                roles[id(parameter)] = "vector"
    output = getattr(model.get_output_embeddings(), "weight", None)
    if output is not None:
        roles[id(output)] = "lm_head"
    return roles | {id(table): "embed" for table in embeddings if table is not None and table.ndim == 2}


def judge(model):
    """Return the table's row of a model and what is wrong with its groups, by parameter name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        groups, _ = build_dion_optimizer(MuonConfig(), model)
        seconds = time.perf_counter() - start
    found = collections.defaultdict(list)
    for group in groups:
        for parameter in group["params"]:
            found[id(parameter)].append(group["role"])
    expected = expected_roles(model)
    wrong = []
    for name, parameter in model.named_parameters():
        roles, role = found.pop(id(parameter), []), expected.get(id(parameter))
        if len(roles) != parameter.requires_grad or (roles and role is not None and roles != [role]):
            wrong.append(f"{name} {tuple(parameter.shape)}: {roles or 'no group'}, expected {role or 'one role'}")
    wrong += ["a parameter that the model does not have"] * len(found)
    row = {"class": type(model).__name__, "elements": f"{sum(p.numel() for p in model.parameters()) / 1e6:,.0f} M"}
    for role in ("matrix", "vector", "embed", "lm_head"):
        row[role] = sum(len(group["params"]) for group in groups if group["role"] == role)
    asked = [str(w.message) for w in caught if "may be matrices or tables" in str(w.message)]
    return row | {"warned": "yes" if asked else "", "ms": round(1e3 * seconds), "wrong": len(wrong)}, wrong, asked


def main():
    """Print the table, what transformers does not build, what was ambiguous, what is wrong; return the exit status."""
    rows, unbuilt, ambiguous, failures = {}, {}, {}, {}
    for kind in KINDS:
        model, reason = build(kind)
        if model is None:
            unbuilt[kind] = reason
            continue
        rows[kind], wrong, asked = judge(model)
        failures |= {kind: wrong} if wrong else {}
        ambiguous |= {kind: asked} if asked else {}
    print(pd.DataFrame.from_dict(rows, orient="index").to_string())
    print(f"\ntransformers {transformers.__version__} does not build {len(unbuilt)} from their default configuration:")
    print("\n".join(f"  {kind}: {reason[:110]}" for kind, reason in unbuilt.items()))
    print("\nambiguous, taken as matrices with a warning:")
    print("\n".join(f"  {kind}: {line[:200]}" for kind, lines in ambiguous.items() for line in lines))
    for kind, lines in failures.items():
        print(f"\nWRONG {kind}:\n  " + "\n  ".join(lines[:10]))
    print(f"\n{len(rows)} architectures, {len(failures)} with failures, {len(ambiguous)} with ambiguous parameters")
    return int(bool(failures) or len(rows) < FEWEST)


if __name__ == "__main__":
    sys.exit(main())
