"""What a run is made of: its model with initial weights, and the checks that concern model and data together."""

from __future__ import annotations

import torch
from torch import nn

from ..config import Factory, RunConfig
from ..model import GPT


def build_model(run: RunConfig) -> nn.Module:
    """Return the model of a run on the CPU, with the initial weights of its seed."""
    if not isinstance(run.model, Factory):
        return GPT(run.model, seed=run.seed)
    with torch.random.fork_rng([]):
        torch.manual_seed(run.seed)
        model: nn.Module = run.model.load()(**run.model.kwargs)
        return model


def context_of(run: RunConfig) -> int:
    """Return the number of tokens in a window of a run.

    Raises:
        ValueError: your own model without ``RunConfig.context``, or a window longer than the learned positions.
    """
    if isinstance(run.model, Factory):
        if run.context is None:
            raise ValueError(f"context=None was given with the model {run.model.name!r}; allowed is a number of tokens")
        return run.context
    context = run.context or run.model.context
    if context > run.model.context and run.model.positions == "learned":
        raise ValueError(f"context={context} was given; allowed is up to the {run.model.context} learned positions")
    return context


def vocab_size(model: nn.Module) -> int:
    """Return how many ids a model knows: the rows of its input embedding, or else of its first embedding.

    Raises:
        ValueError: your own model has no embedding.
    """
    find = getattr(model, "get_input_embeddings", None)
    tables = [find()] if find is not None else [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if not tables:
        raise ValueError(f"{type(model).__name__} was given, which has no nn.Embedding; allowed is a model of ids")
    rows: int = tables[0].num_embeddings
    return rows
