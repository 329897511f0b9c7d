"""Models whose parameter groups are worth a look, from 1 M to 671 B parameters, without storage."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from torch import nn

from ..config import ModelConfig, MuonConfig
from ..groups import group_table
from ..model import GPT, transformers_model


def growing_models() -> dict[int, nn.Module]:
    """Return GPTs of widths 64 to 4096, depth width/64 and GPT-2's vocabulary, by width; none has storage."""
    models: dict[int, nn.Module] = {}
    for width in (64, 128, 256, 512, 1024, 2048, 4096):
        layers = max(2, width // 64)
        models[width] = GPT(ModelConfig(vocab_size=50_304, width=width, depth=layers, heads=layers), device="meta")
    return models


def known_models() -> dict[str, nn.Module]:
    """Return models from 1 M to 671 B parameters by name, without storage; all but the first are transformers'."""
    models: dict[str, nn.Module] = {"GPT, width 128": GPT(ModelConfig(width=128, depth=4), device="meta")}
    kinds = {"GPT-2": "gpt2", "Llama 7B": "llama", "Qwen3 MoE": "qwen3_moe", "DeepSeek-V3": "deepseek_v3"}
    with torch.device("meta"):
        return models | {name: transformers_model(kind) for name, kind in kinds.items()}


def group_tables(models: Mapping[Any, nn.Module], optimizer: MuonConfig, *, label: str = "model") -> pd.DataFrame:
    """Return the group tables of several models, one below the other, each named in the column ``label``."""
    tables = []
    for name, model in models.items():
        with warnings.catch_warnings():  # the tables of small models outweigh the matrices, which is what this shows
            warnings.simplefilter("ignore", UserWarning)
            tables.append(group_table(model, optimizer).assign(**{label: name}))
    return pd.concat(tables, ignore_index=True)
