"""A small decoder-only GPT. Tensors have their shape in their name; nothing here knows of optimizers.

Letters: B batch, T tokens, D width, H heads, K head width, V vocabulary. Pre-norm blocks with RMSNorm (arXiv
1910.07467), rotary positions (arXiv 2104.09864) and a ReLU^2 MLP (arXiv 2109.08668).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig

ROTARY_BASE = 10_000.0  # arXiv 2104.09864, section 3.2.2
NORM_EPS = 1e-6


class Attention(nn.Module):
    """Causal self-attention with separate q, k, v and o: ``(B, T, D) -> (B, T, D)``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q, self.k, self.v, self.o = (nn.Linear(config.width, config.width, bias=config.bias) for _ in range(4))

    def forward(self, x_BTD: Tensor, rotary_TK: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the mixed values; ``rotary_TK`` holds cosines and sines, or is None for learned positions."""
        q_BHTK, k_BHTK, v_BHTK = (
            project(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        if rotary_TK is not None:
            q_BHTK, k_BHTK = rotate(q_BHTK, *rotary_TK), rotate(k_BHTK, *rotary_TK)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.o(y_BHTK.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two linear layers around ReLU squared: ``(B, T, D) -> (B, T, D)``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.up = nn.Linear(config.width, hidden, bias=config.bias)
        self.down = nn.Linear(hidden, config.width, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the transformed activations."""
        return self.down(F.relu(self.up(x_BTD)).square())


class Block(nn.Module):
    """One pre-norm transformer block: ``(B, T, D) -> (B, T, D)``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(config.width, eps=NORM_EPS) for _ in range(2))
        self.attn, self.mlp = Attention(config), MLP(config)

    def forward(self, x_BTD: Tensor, rotary_TK: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the residual stream after attention and MLP."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), rotary_TK)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    """``embed``, ``blocks``, ``norm``, ``lm_head``; ids ``(B, T)`` -> logits ``(B, T, V)``.

    The initial weights depend on ``config`` and ``seed`` alone and are drawn from a private generator.
    ``device="meta"`` gives a model of any size without storage.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):  # only shapes: nn's own initialization would draw from the global generator
            self.embed = nn.Embedding(config.vocab_size, config.width)
            self.pos_embed = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
            self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
            self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        if device != "meta":
            self.to_empty(device="cpu")
        if config.tied:
            self.lm_head.weight = self.embed.weight
        if device != "meta":
            self._initialize(seed)
            self.to(device)

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        """Draw every weight: matrices at matrix_std/sqrt(fan_in), residual outputs also over sqrt(2 depth)."""
        generator = torch.Generator().manual_seed(seed)
        config = self.config
        # As a head, a tied table with the embedding's std would make huge logits.
        table_std = config.head_std if config.tied else config.embed_std
        stds = {self.embed.weight: table_std, self.lm_head.weight: config.head_std}
        if self.pos_embed is not None:
            stds[self.pos_embed.weight] = table_std
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = stds.get(parameter, config.matrix_std / math.sqrt(parameter.shape[-1]))
            if name.endswith(("attn.o.weight", "mlp.down.weight")):  # what adds to the residual stream, as in GPT-2
                std /= math.sqrt(2 * config.depth)
            parameter.normal_(0.0, std, generator=generator) if std else parameter.zero_()

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return logits ``(B, T, V)``.

        Raises:
            ValueError: more tokens than learned positions.
        """
        tokens = ids_BT.shape[-1]
        x_BTD, rotary_TK = self.embed(ids_BT), None
        if self.pos_embed is None:
            rotary_TK = rotary(tokens, self.config.width // self.config.heads, ids_BT.device)
        elif tokens <= self.config.context:
            x_BTD = x_BTD + self.pos_embed.weight[:tokens]
        else:
            raise ValueError(f"{tokens} tokens were given; allowed are the {self.config.context} learned positions")
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary_TK)
        return self.lm_head(self.norm(x_BTD))


def rotary(tokens: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines ``(T, K/2)`` of the rotary angles, in float32."""
    steps = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    angles_TK = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), ROTARY_BASE**-steps)
    return angles_TK.cos(), angles_TK.sin()


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Return ``x`` with the pairs (k, k + K/2) of each head turned by the token's angles; the dtype is kept."""
    a, b = x_BHTK.chunk(2, dim=-1)
    return torch.cat((a * cos_TK - b * sin_TK, b * cos_TK + a * sin_TK), dim=-1).to(x_BHTK.dtype)


def next_token_loss(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats/token; the model returns logits or an object with ``.logits``."""
    output: Any = model(x_BT)
    logits_BTV = getattr(output, "logits", output)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), y_BT.flatten())


def transformers_model(model_type: str, **config: Any) -> nn.Module:
    """Return a Hugging Face causal LM with fresh weights, built from its configuration (nothing is downloaded).

    For ``Factory(name="sandbox.model:transformers_model", kwargs={"model_type": "gpt2", "n_layer": 2, ...})``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))


def parameter_count(config: ModelConfig) -> int:
    """Return the number of distinct parameters of ``GPT(config)``, by formula."""
    d, hidden = config.width, config.mlp_ratio * config.width
    block = 4 * d * d + 2 * d * hidden + 2 * d + config.bias * (5 * d + hidden)
    tables = config.vocab_size * d * (1 if config.tied else 2) + (config.positions == "learned") * config.context * d
    return config.depth * block + tables + d
