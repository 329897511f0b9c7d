"""The contract of the reference module (NVIDIA NeMo Automodel ``components/optim/dion``), and the making of optimizers.

Code written against the reference only has to change its import line.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import nn

from ..config import (
    AdamWConfig,
    Backend,
    Dion2Config,
    DionConfig,
    DionFamilyConfig,
    Factory,
    GroupPolicy,
    ModelConfig,
    MuonConfig,
    NorMuonConfig,
    OrthogonalizedConfig,
    RunConfig,
)
from .mesh import get_dion_mesh, refuse_whole
from .rates import OPTIONAL, Rates, config_rates, role_rates
from .roles import DEFAULT, decide_roles
from .separate import Groups, by_role, check_complete, low_share, orthogonal, policy_of, role_groups, stored_rule

logger = logging.getLogger("sandbox.builder")  # the name under which code written against the contract finds it

_NATIVE = {MuonConfig: "Muon", NorMuonConfig: "NorMuon", Dion2Config: "Dion2", DionConfig: "Dion"}
_DION_MESH = "outer_shard_mesh"  # the argument of Dion for its mesh; that of the others is distributed_mesh
_SHOWN = ("param_names", "reason")  # keys for people, which the reference's groups do not have
# Fields of a config that are no argument of the native classes: they are used here, or have no meaning there.
_NOT_NATIVE = {*OPTIONAL, "scalar_opt", "scalar_betas", "scalar_eps", "backend", "policy", "no_compile"}


class _DionFamilyConfig(Protocol):
    """What ``build_dion_optimizer`` reads. scalar_lr, embed_lr, lm_head_lr, no_compile and policy may be missing."""

    lr: float
    weight_decay: float
    scalar_opt: str
    scalar_betas: tuple[float, float] | None
    scalar_eps: float | None


def _upstream_error() -> Exception | None:
    try:
        importlib.import_module("dion")
    except Exception as error:  # whatever the import raises is kept as the reason
        return error
    return None


def __getattr__(name: str) -> Any:
    """Return ``_import_error``: what importing ``dion`` raised, or None. The import is tried when somebody asks."""
    if name == "_import_error":
        globals()[name] = _upstream_error()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def separate_param_groups(
    model: nn.Module,
    base_lr: float,
    scalar_opt: str,
    weight_decay: float,
    scalar_betas: Sequence[float] | None = None,
    scalar_eps: float | None = None,
    scalar_lr: float | None = None,
    embed_lr: float | None = None,
    lm_head_lr: float | None = None,
    *,
    policy: GroupPolicy = DEFAULT,
) -> Groups:
    """Return the groups of ``model``: matrix, vector, embed (even when empty), lm_head only where there is one.

    Raises:
        ValueError: an unknown ``scalar_opt``; ``lm_head_lr`` without a head of its own; as ``roles.decide_roles``.
    """
    rates = role_rates(base_lr, scalar_opt, weight_decay, scalar_betas, scalar_eps, scalar_lr, embed_lr, lm_head_lr)
    return _contract(role_groups(model, rates, policy, stored="rate"))


def build_dion_optimizer(
    config: _DionFamilyConfig,
    model: nn.Module,
    device_mesh: Any = None,
    mesh_kwarg: str | None = "distributed_mesh",
) -> tuple[Groups, dict[str, Any]]:
    """Return ``(param_groups, mesh_kwargs)`` for the constructor of a Dion-family optimizer. It builds no optimizer.

    ``mesh_kwargs`` maps ``mesh_kwarg`` to the one-dimensional mesh, or is empty without one.

    Raises:
        ValueError: a required attribute of ``config`` is missing; as ``separate_param_groups`` and ``get_dion_mesh``.
    """
    rates = config_rates(config)
    groups = role_groups(model, rates, policy_of(config), stored=stored_rule(config, native=False))
    for group in groups:
        _log(group, rates)
    return _contract(groups), _mesh_kwargs(device_mesh, model, mesh_kwarg)


def _contract(groups: Groups) -> Groups:
    """Return the groups with only the reference's keys and ``role``."""
    return [{key: value for key, value in group.items() if key not in _SHOWN} for group in groups]


def _mesh_kwargs(device_mesh: Any, model: nn.Module, mesh_kwarg: str | None) -> dict[str, Any]:
    if mesh_kwarg is None:
        return {}
    mesh = get_dion_mesh(device_mesh, model, tensor_parallel=mesh_kwarg == _DION_MESH)
    return {} if mesh is None else {mesh_kwarg: mesh}


def _log(group: dict[str, Any], rates: Rates) -> None:
    algorithm, elements = group.get("algorithm", "the optimizer's own"), sum(p.numel() for p in group["params"])
    line = "%s: algorithm %s, %d tensors, %d elements, lr %g"
    logger.info(line, group["role"], algorithm, len(group["params"]), elements, group.get("lr", rates.base))


def is_dion_optimizer(optimizer_factory: Any) -> bool:
    """Return whether a class, an instance, a config or a ``functools.partial`` of one is of the Dion family.

    Native (``sandbox.optim``) and upstream (``dion``) optimizers and their subclasses are; ``torch.optim.Muon`` is not.
    """
    while isinstance(optimizer_factory, functools.partial):
        optimizer_factory = optimizer_factory.func
    cls = optimizer_factory if isinstance(optimizer_factory, type) else type(optimizer_factory)
    if cls in _NATIVE:
        return True
    homes = [base.__module__.split(".") for base in cls.__mro__]
    native = issubclass(cls, torch.optim.Optimizer) and any(home[:2] == ["sandbox", "optim"] for home in homes)
    return native or any(home[0] == "dion" for home in homes)


def build_optimizer(config: Any, model: nn.Module, device_mesh: Any = None) -> torch.optim.Optimizer:
    """Return the optimizer that ``config`` describes over ``model``.

    Every group is non-empty and has ``role``, ``param_names``, ``initial_lr`` and ``reason``.

    Raises:
        ValueError: nothing to train; no matrix at all under a Dion-family config; as ``build_dion_optimizer``.
    """
    if isinstance(config, Factory):
        return _own_optimizer(config, model)
    if type(config) not in (*_NATIVE, AdamWConfig):
        kinds = ", ".join(kind.__name__ for kind in (*_NATIVE, AdamWConfig, Factory))
        raise ValueError(f"a {type(config).__name__} was given as an optimizer's config; allowed are {kinds}")
    backend = _backend(config, model)
    rates, rule = config_rates(config), stored_rule(config, native=backend == "native")
    groups = by_role(role_groups(model, rates, policy_of(config), stored=rule))
    shown = [{key: group[key] for key in _SHOWN} for group in groups if group["params"]]
    used = [group for group in _contract(groups) if group["params"]]
    _audit(config, model, used, rates)
    optimizer = _construct(config, backend, used, model, device_mesh)
    for group, more in zip(optimizer.param_groups, shown, strict=True):
        group.update(more)
        group["initial_lr"] = float(group["lr"])
        _log(group, rates)
    check_complete(model, optimizer.param_groups)
    return optimizer


def _own_optimizer(config: Factory, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a factory: a class gets one group for each role, any other callable gets the model."""
    make: Any = config.load()
    if not (isinstance(make, type) and issubclass(make, torch.optim.Optimizer)):
        optimizer: torch.optim.Optimizer = make(model, **config.kwargs)
        return optimizer
    groups: dict[str, list[nn.Parameter]] = {}
    for decision in decide_roles(model, DEFAULT)[0]:
        groups.setdefault(decision.role, []).append(decision.parameter)
    return make([{"params": params, "role": role} for role, params in groups.items()], **config.kwargs)


def _audit(config: Any, model: nn.Module, groups: Groups, rates: Rates) -> None:
    """Refuse an optimizer that would do nothing, and warn of what looks like a mistake."""
    if not groups:
        raise ValueError("the model has no trainable parameter; unfreeze some")
    roles = {group["role"] for group in groups}
    reach = {"embed_lr": {"embed"}, "scalar_lr": {"vector"} if "embed_lr" in rates.declared else {"vector", "embed"}}
    for name, reached in reach.items():
        if name in rates.declared and not roles & reached:
            _say_once(f"{name}={rates.declared[name]} reaches no parameter, none is {' or '.join(sorted(reached))}")
    if isinstance(config, AdamWConfig):
        return
    if not any(map(orthogonal, groups)) and all(p.requires_grad or p.ndim < 2 for p in model.parameters()):
        raise ValueError(f"the model has no matrix, {type(config).__name__} would do nothing to it; use AdamWConfig")
    sentence = low_share(groups)
    if sentence:
        _say_once(sentence)


_say_once = functools.lru_cache(maxsize=256)(logger.warning)  # a sweep builds the same model many times


def _backend(config: Any, model: nn.Module) -> str:
    """Return "torch", "native" or "dion"."""
    if isinstance(config, AdamWConfig):
        return "torch"
    device = next((p.device.type for p in model.parameters()), "cpu")
    return resolve_backend(config.backend, device)


def _construct(config: Any, backend: str, groups: Groups, model: nn.Module, device_mesh: Any) -> torch.optim.Optimizer:
    if backend == "torch":
        for group in groups:
            if group.setdefault("algorithm", "adamw") != "adamw":
                raise ValueError(
                    f"an override with algorithm={group['algorithm']!r} was given; AdamWConfig has 'adamw'"
                )
        options = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
        return torch.optim.AdamW(groups, **options)
    mesh_kwargs = _mesh_kwargs(device_mesh, model, _DION_MESH if type(config) is DionConfig else "distributed_mesh")
    if backend == "dion":
        from . import upstream

        return upstream.build(config, groups, mesh_kwargs)
    from .. import optim

    for mesh in mesh_kwargs.values():
        refuse_whole(mesh, model)
    names = {field.name for field in dataclasses.fields(config)} - _NOT_NATIVE
    return getattr(optim, _NATIVE[type(config)])(groups, **{n: getattr(config, n) for n in names}, **mesh_kwargs)


def resolve_backend(backend: Backend, device: str) -> Literal["native", "dion"]:
    """Return "native" or "dion". "auto" means "dion" on CUDA if the package is installed, else "native"."""
    if backend != "auto":
        return backend
    return "dion" if device == "cuda" and importlib.util.find_spec("dion") is not None else "native"


def resolve_auto(run: RunConfig) -> RunConfig:
    """Return ``run`` with every ``"auto"`` replaced by what it means on this machine.

    ``device="cuda"`` stays on a machine without CUDA: the login node of a cluster resolves runs of its GPU nodes.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if run.device == "auto" else run.device
    fast: Literal["bfloat16", "float32"] = "bfloat16" if device == "cuda" else "float32"
    optimizer = run.optimizer
    if isinstance(optimizer, DionFamilyConfig) and optimizer.backend == "auto":
        optimizer = replace(optimizer, backend=resolve_backend("auto", device))
    if isinstance(optimizer, OrthogonalizedConfig) and optimizer.orthogonalize_dtype == "auto":
        upstreams = optimizer.backend == "dion"  # it always computes in bfloat16
        optimizer = replace(optimizer, orthogonalize_dtype="bfloat16" if upstreams else fast)
    own = run.model.context if isinstance(run.model, ModelConfig) else None
    context = own if run.context is None else run.context
    dtype = fast if run.dtype == "auto" else run.dtype
    return replace(run, device=device, dtype=dtype, optimizer=optimizer, context=context)


_separate_param_groups = separate_param_groups
_get_dion_mesh = get_dion_mesh
