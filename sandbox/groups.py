"""Role -> one explicit optimizer group a role, and the table that shows them.

Group order and keys are the reference's (NVIDIA NeMo Automodel ``components/optim/dion``), plus the key ``role``.
"""

from __future__ import annotations

import re
import typing
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .config import GroupPolicy
from .rates import Rates, config_rates, lm_head_rate
from .roles import DEFAULT, Decision, Role, decide_roles, explain_roles, param_roles

if typing.TYPE_CHECKING:
    import pandas as pd

__all__ = ["Role", "explain_roles", "group_table", "param_roles", "separate", "separate_named"]

Transposed = typing.Literal["flag", "rate", "none"]
COLUMNS = ("role", "algorithm", "tensors", "elements", "share", "lr", "weight_decay", "reason", "names")


def separate(
    decisions: Iterable[Decision], rates: Rates, policy: GroupPolicy, *, transposed: Transposed
) -> list[dict[str, Any]]:
    """Return the groups with the keys of the contract: matrix, vector, embed, then heads, then groups of their own.

    The first three are there even when empty. ``transposed`` says how a matrix stored (in, out) gets the rate scale of
    its true fan_out and fan_in: "flag" sets the native optimizers' key of that name, "rate" gives it a group whose rate
    makes good for the factor sqrt(in/out) that any optimizer of the family will apply, "none" leaves it.
    """
    named = separate_named(decisions, rates, policy, transposed=transposed)
    return [{key: value for key, value in group.items() if key not in ("param_names", "reason")} for group in named]


def separate_named(
    decisions: Iterable[Decision], rates: Rates, policy: GroupPolicy, *, transposed: Transposed
) -> list[dict[str, Any]]:
    """Return the groups of ``separate`` with two keys more: ``param_names`` (canonical) and ``reason``."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    members: dict[tuple[Any, ...], list[Decision]] = {}
    for role in ("matrix", "vector", "embed"):
        settings = _settings(role, rates)
        groups[_key(settings)], members[_key(settings)] = settings, []
    for decision in decisions:
        settings = _own_settings(decision, rates, policy, transposed)
        key = _key(settings)
        groups.setdefault(key, settings)
        members.setdefault(key, []).append(decision)
    ordinary = 3
    heads = [key for key in list(groups)[ordinary:] if dict(key)["role"] == "lm_head"]
    order = [*list(groups)[:ordinary], *heads, *(key for key in list(groups)[ordinary:] if key not in heads)]
    return [_group(groups[key], members[key]) for key in order]


def _group(settings: dict[str, Any], members: list[Decision]) -> dict[str, Any]:
    reasons = ", ".join(dict.fromkeys(d.reason + (" (?)" if d.unsure else "") for d in members))
    names = [d.name for d in members]
    return {"params": [d.parameter for d in members], **settings, "param_names": names, "reason": reasons}


def _key(settings: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(settings.items())


def _settings(role: str, rates: Rates, algorithm: str | None = None) -> dict[str, Any]:
    """Return the keys of a role's ordinary group; a matrix group inherits all from the optimizer."""
    if role == "matrix" and algorithm is None:
        return {"role": role}
    settings: dict[str, Any] = {"role": role, "algorithm": algorithm or rates.algorithm}
    if role != "lm_head":
        settings["lr"] = {"matrix": rates.base, "vector": rates.vector, "embed": rates.embed}[role]
    settings["weight_decay"] = rates.decay if role in ("matrix", "vector") else 0.0
    if rates.betas is not None:
        settings["beta1"], settings["beta2"] = rates.betas
    if rates.eps is not None:
        settings["epsilon"] = rates.eps
    return settings


def _own_settings(decision: Decision, rates: Rates, policy: GroupPolicy, transposed: Transposed) -> dict[str, Any]:
    """Return the keys of the group that ``decision`` belongs to."""
    override, role = decision.override, decision.role
    settings = _settings(role, rates, override.algorithm if override else None)
    if role == "lm_head":
        d_in = decision.fan[1] if decision.fan else decision.parameter.shape[-1]
        settings["lr"] = lm_head_rate(rates, d_in, policy.lm_head_rule)
    if override is not None:
        if role == "matrix" and override.algorithm is not None and override.lr is None:
            raise ValueError(
                f"the override {override.pattern!r} moves {decision.name!r} from the orthogonal optimizer to "
                f"{override.algorithm} without a rate; give it lr=..."
            )
        settings |= {k: v for k, v in (("lr", override.lr), ("weight_decay", override.weight_decay)) if v is not None}
    if role == "matrix" and "algorithm" not in settings:
        if decision.flatten:
            settings["flatten"] = True
        elif decision.fan is not None and transposed == "flag":
            settings["transposed"] = True
        elif decision.fan is not None and transposed == "rate" and decision.fan[0] != decision.fan[1]:
            # sqrt(in/out) is what the optimizer will apply; out/in makes sqrt(out/in) of it. Decay is rate x decay.
            ratio = decision.fan[0] / decision.fan[1]
            settings["lr"] = settings.get("lr", rates.base) * ratio
            settings["weight_decay"] = settings.get("weight_decay", rates.decay) / ratio
    return settings


def group_table(
    source: nn.Module | torch.optim.Optimizer | Sequence[dict[str, Any]], config: Any = None
) -> pd.DataFrame:
    """Return one row a group: role, algorithm, tensors, elements, share, lr, weight_decay, reason, names.

    ``source`` is a model (with the optimizer's ``config``, or without: no rates then), a built optimizer of any kind,
    or its groups. ``share`` is of all elements in the table. ``lr`` and ``weight_decay`` are the group's own, before
    the schedule; a Dion-family optimizer multiplies a matrix's step (not its decay) by a factor of its shape besides:
    sqrt(fan_out/fan_in) for "spectral_norm" and Dion, 0.2 sqrt(max(fan_out, fan_in)) for "rms_norm". Every row consists
    of plain JSON values.

    Warns:
        UserWarning: for a model, when under half of its elements are under the orthogonal optimizer.
    """
    import pandas as pd  # takes longer than all else here

    if isinstance(source, nn.Module):
        groups = _model_groups(source, config)
    else:
        groups = source.param_groups if isinstance(source, torch.optim.Optimizer) else source
    total = sum(p.numel() for g in groups for p in g["params"])
    rows = [_row(group, total, config) for group in groups]
    if isinstance(source, nn.Module):
        sentence = low_share(groups)
        if sentence:
            warnings.warn(sentence, stacklevel=2)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def low_share(groups: Sequence[dict[str, Any]]) -> str | None:
    """Return a sentence when under half of the elements are matrices, else None."""
    total = sum(p.numel() for g in groups for p in g["params"])
    matrix = sum(p.numel() for g in groups if g.get("role") == "matrix" for p in g["params"])
    if total == 0 or matrix * 2 >= total:
        return None
    return f"only {matrix / total:.0%} of the {total:,} elements are under the orthogonal optimizer"


def _model_groups(model: nn.Module, config: Any) -> list[dict[str, Any]]:
    policy = getattr(config, "policy", DEFAULT)
    rates = Rates(None, None, None, None, None, None, None, None, ()) if config is None else config_rates(config)
    if config is None:
        trainable = decide_roles(model, policy)[0]
        groups = [_group({"role": role}, [d for d in trainable if d.role == role]) for role in typing.get_args(Role)]
        return [group for group in groups if group["params"]]
    groups = separate_named(decide_roles(model, policy)[0], rates, policy, transposed=transposed_rule(config, "native"))
    return [group for group in groups if group["params"]]


def transposed_rule(config: Any, backend: str = "dion") -> Transposed:
    """Return how the optimizer of ``config`` is told of a matrix stored (in, out), see ``separate``."""
    if hasattr(config, "eps"):  # AdamW knows no shapes
        return "none"
    if backend == "native":
        return "flag"
    return "rate" if getattr(config, "adjust_lr", "spectral_norm") == "spectral_norm" else "none"


def _row(group: dict[str, Any], total: int, config: Any) -> dict[str, Any]:
    elements = sum(p.numel() for p in group["params"])
    algorithm = group.get("algorithm")
    if algorithm is None and config is not None:
        algorithm = type(config).__name__.removesuffix("Config").lower()
    names = group.get("param_names", [])
    return {
        "role": group.get("role"),
        "algorithm": algorithm,
        "tensors": len(group["params"]),
        "elements": elements,
        "share": elements / total if total else 0.0,
        "lr": _number(group.get("initial_lr", group.get("lr", getattr(config, "lr", None)))),
        "weight_decay": _number(group.get("weight_decay", getattr(config, "weight_decay", None))),
        "reason": group.get("reason", ""),
        "names": brief(names),
    }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def brief(names: Sequence[str]) -> str:
    """Return names in one line, runs of block numbers in more than six of them as ranges: ``blocks.0-11.q.weight``."""
    if len(names) <= 6:
        return ", ".join(names)
    shapes: dict[tuple[str, ...], list[list[int]]] = {}
    for name in names:
        parts = re.split(r"\b(\d+)\b", name)
        shapes.setdefault(tuple(parts[::2]), []).append([int(n) for n in parts[1::2]])
    return ", ".join(_ranged(texts, numbers) for texts, numbers in shapes.items())


def _ranged(texts: tuple[str, ...], numbers: list[list[int]]) -> str:
    line = texts[0]
    for text, column in zip(texts[1:], zip(*numbers, strict=True), strict=True):
        low, high = min(column), max(column)
        line += (str(low) if low == high else f"{low}-{high}") + text
    return line
