"""Roles and rates -> the optimizer groups, one for each role.

Group order and keys are the reference's (NVIDIA NeMo Automodel ``components/optim/dion``), plus the key ``role``.
"""

from __future__ import annotations

import collections
import typing
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from ..config import AdamWConfig, GroupPolicy
from .rates import Rates, config_rates, head_rate
from .roles import DEFAULT, Decision, Role, decide_roles, explain_roles, param_roles

__all__ = [
    "Groups",
    "Role",
    "check_complete",
    "explain_roles",
    "make_groups",
    "param_roles",
    "role_groups",
]

ALWAYS = ("matrix", "vector", "embed")  # groups that the contract has even when they are empty
Groups = list[dict[str, Any]]
# A matrix stored (in, out) needs the rate scale of its true fan_out and fan_in. "key": the native optimizers have the
# key ``transposed`` for it. "rate": the rate is changed so that it cancels the wrong factor, which the optimizer will
# apply. "ignored": the optimizer applies no such factor.
Stored = Literal["key", "rate", "ignored"]


def role_groups(model: nn.Module, rates: Rates, policy: GroupPolicy, *, stored: Stored) -> Groups:
    """Decide the roles of the model's parameters, check the model as a whole, and return its groups (``make_groups``).

    Raises:
        ValueError: ``lm_head_lr`` for a model without a trainable head of its own; as ``decide_roles``.

    Warns:
        UserWarning: there are matrices, but all of them are frozen.
    """
    trainable, frozen = decide_roles(model, policy)
    if rates.lm_head is not None and not any(d.role == "lm_head" for d in trainable):
        why = (
            "whose head is frozen" if any(d.role == "lm_head" for d in frozen) else "without a head of its own (tied?)"
        )
        raise ValueError(f"lm_head_lr={rates.lm_head} was given for a model {why}; allowed is None")
    groups = make_groups(trainable, rates, policy, stored=stored)
    matrices = [d.name for d in frozen if d.role == "matrix"]
    if matrices and not any(group["params"] for group in groups if orthogonal(group)):
        warnings.warn(f"all {len(matrices)} matrices are frozen, none is left to orthogonalize", stacklevel=3)
    return groups


def make_groups(decisions: Sequence[Decision], rates: Rates, policy: GroupPolicy, *, stored: Stored) -> Groups:
    """Return the groups: matrix, vector, embed (even if empty), then heads, then groups with their own settings.

    Keys: params, role, then what the contract says, then param_names (canonical) and reason.
    """
    usual = {role: tuple(_settings(role, rates).items()) for role in ALWAYS}
    members: dict[tuple[Any, ...], list[Decision]] = {key: [] for key in usual.values()}
    for decision in decisions:
        plain = decision.role in usual and not (decision.override or decision.fan or decision.flatten)
        key = usual[decision.role] if plain else tuple(_own_settings(decision, rates, policy, stored).items())
        members.setdefault(key, []).append(decision)
    ordinary, rest = list(usual.values()), list(members)[len(usual) :]
    rest.sort(key=lambda key: dict(key)["role"] != "lm_head")
    return [_group(dict(key), members[key]) for key in ordinary + rest]


def by_role(groups: Groups) -> Groups:
    """Return the groups sorted by role; a group with its own settings stays next to the ordinary group of its role."""
    return sorted(groups, key=lambda group: typing.get_args(Role).index(group["role"]))


def _group(settings: dict[str, Any], members: list[Decision]) -> dict[str, Any]:
    reasons = ", ".join(dict.fromkeys(d.reason + (" (?)" if d.unsure else "") for d in members))
    names = [d.name for d in members]
    return {"params": [d.parameter for d in members], **settings, "param_names": names, "reason": reasons}


def orthogonal(group: dict[str, Any]) -> bool:
    """Return whether a group that ``make_groups`` made goes to the matrix rule."""
    return group["role"] == "matrix" and "algorithm" not in group


def _settings(role: str, rates: Rates, *, algorithm: str | None = None, lr: float | None = None) -> dict[str, Any]:
    """Return the keys of a role's ordinary group. A matrix group has none: it takes all options from the optimizer."""
    if role == "matrix" and algorithm is None:
        return {"role": role}
    own = {"matrix": rates.base, "vector": rates.vector, "embed": rates.embed}
    settings = {
        "role": role,
        "algorithm": algorithm or rates.algorithm,
        "lr": own[role] if lr is None else lr,
        "weight_decay": rates.decay if role in ("matrix", "vector") else 0.0,
    }
    if rates.betas is not None:
        settings["beta1"], settings["beta2"] = rates.betas
    return settings if rates.eps is None else settings | {"epsilon": rates.eps}


def _own_settings(decision: Decision, rates: Rates, policy: GroupPolicy, stored: Stored) -> dict[str, Any]:
    """Return the keys of the group that ``decision`` belongs to."""
    override, role, fan = decision.override, decision.role, decision.fan
    algorithm = override.algorithm if override is not None else None
    if override is not None and role == "matrix" and algorithm is not None and override.lr is None:
        raise ValueError(
            f"the override {override.pattern!r} moves {decision.name!r} from the orthogonal optimizer to {algorithm} "
            "without a rate; give it lr=..."
        )
    d_in = fan[1] if fan else decision.parameter.shape[-1:].numel()
    head = head_rate(rates, d_in, policy.lm_head_rule) if role == "lm_head" else None
    settings = _settings(role, rates, algorithm=algorithm, lr=head)
    if override is not None:
        own = {"lr": override.lr, "weight_decay": override.weight_decay}
        settings |= {key: value for key, value in own.items() if value is not None}
    if orthogonal(settings) and decision.flatten:
        settings["flatten"] = True
    if orthogonal(settings) and fan and stored == "key":
        settings["transposed"] = True
    if orthogonal(settings) and fan and stored == "rate" and fan[0] != fan[1]:
        # The optimizer will multiply by sqrt(in/out). Multiplied by out/in as well, that is sqrt(out/in). The decay is
        # divided by the same number, because weights decay by rate times decay.
        settings["lr"] = settings.get("lr", rates.base) * fan[0] / fan[1]
        settings["weight_decay"] = settings.get("weight_decay", rates.decay) * fan[1] / fan[0]
    return settings


def check_complete(model: nn.Module, groups: Groups) -> None:
    """Check that the groups (of a built optimizer, too) hold each trainable parameter of ``model`` exactly once.

    Raises:
        ValueError: a parameter is in no group, in two groups, or does not belong to the model. The last happens when
            the optimizer was built before the model was sharded or moved: it would train tensors that nobody uses.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    held = [id(p) for group in groups for p in group["params"]]
    all_held = set(held)
    twice = [names.get(key, "?") for key, count in collections.Counter(held).items() if count > 1]
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in all_held]
    foreign = [key for key in held if key not in names]
    for what, found in (("are in no group", left), ("are in two groups", twice)):
        if found:
            raise ValueError(f"these parameters {what}: {', '.join(found[:8])}; allowed is one group for each")
    if foreign:
        raise ValueError(
            f"{len(foreign)} of {len(held)} parameters in the groups are not the model's; build the optimizer after "
            "wrapping and sharding the model"
        )


def stored_rule(config: Any, *, native: bool) -> Stored:
    """Return how the optimizer of ``config`` learns that a matrix is stored (in, out)."""
    if native or isinstance(config, AdamWConfig):  # AdamW does not look at shapes
        return "key" if native else "ignored"
    return "rate" if getattr(config, "adjust_lr", "spectral_norm") == "spectral_norm" else "ignored"


def policy_of(config: Any) -> GroupPolicy:
    """Return the policy of any config; an object without one gets the default policy.

    Raises:
        ValueError: ``policy`` is something else.
    """
    policy = getattr(config, "policy", DEFAULT)
    if not isinstance(policy, GroupPolicy):
        raise ValueError(f"policy={policy!r} was given; allowed is a GroupPolicy")
    return policy


def model_groups(model: nn.Module, config: Any = None) -> Groups:
    """Return the non-empty groups of ``model`` under an optimizer's config; without one, its roles without rates."""
    if config is None:
        trainable = decide_roles(model)[0]
        groups = [_group({"role": role}, [d for d in trainable if d.role == role]) for role in typing.get_args(Role)]
    else:
        rule = stored_rule(config, native=not isinstance(config, AdamWConfig))
        groups = by_role(role_groups(model, config_rates(config), policy_of(config), stored=rule))
    return [group for group in groups if group["params"]]


def low_share(groups: Groups) -> str | None:
    """Return a sentence when under half of the elements go to the matrix rule, else None."""
    total = sum(p.numel() for group in groups for p in group["params"])
    matrices = sum(p.numel() for group in groups if orthogonal(group) for p in group["params"])
    if total == 0 or matrices * 2 >= total:
        return None
    return f"only {matrices / total:.0%} of the {total:,} elements are under the orthogonal optimizer"
