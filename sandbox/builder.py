"""The reference module's contract (NVIDIA NeMo Automodel ``components/optim/dion``), and config + model -> optimizer.

Code written against the reference changes only its import line. This is the only room that names the ``dion`` package.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from .config import AdamWConfig, Dion2Config, DionConfig, Factory, GroupPolicy, MuonConfig, NorMuonConfig, RunConfig
from .groups import Transposed, low_share, separate, separate_named, transposed_rule
from .mesh import get_dion_mesh
from .rates import Rates, config_rates, role_rates
from .roles import DEFAULT, Decision, decide_roles

logger = logging.getLogger(__name__)

_NATIVE = {MuonConfig: "Muon", NorMuonConfig: "NorMuon", Dion2Config: "Dion2", DionConfig: "Dion"}
_MESH_KWARG = {DionConfig: "outer_shard_mesh"}  # the others: distributed_mesh
# Fields of a config that are settled here and are no arguments of an optimizer class.
_SETTLED = {"scalar_opt", "scalar_betas", "scalar_eps", "scalar_lr", "embed_lr", "lm_head_lr", "backend", "policy"}
_UPSTREAM_ONLY = {"use_triton", "qr_method"}  # mean nothing to the native classes


class _DionFamilyConfig(Protocol):
    """What ``build_dion_optimizer`` reads; scalar_lr, embed_lr, lm_head_lr, no_compile and policy may be absent."""

    lr: float
    weight_decay: float
    scalar_opt: str
    scalar_betas: tuple[float, float] | None
    scalar_eps: float | None


def _upstream_error() -> Exception | None:
    try:
        importlib.import_module("dion")
    except Exception as error:  # whatever its import raises, the reason is kept
        return error
    return None


def __getattr__(name: str) -> Any:
    """Return ``_import_error``: what importing ``dion`` raised, or None; found out only when asked for."""
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
    transposed: Transposed = "rate",
) -> list[dict[str, Any]]:
    """Return the groups of ``model``: matrix, vector, embed (even when empty), lm_head only where there is one.

    ``transposed`` says how a matrix stored (in, out) gets its true rate scale, see ``groups.separate``.

    Raises:
        ValueError: an unknown ``scalar_opt``; ``lm_head_lr`` without a head of its own; as ``decide_roles``.
    """
    rates = role_rates(base_lr, scalar_opt, weight_decay, scalar_betas, scalar_eps, scalar_lr, embed_lr, lm_head_lr)
    trainable, frozen = decide_roles(model, policy)
    _refuse_lost_head_rate(rates, trainable, frozen)
    return separate(trainable, rates, policy, transposed=transposed)


def build_dion_optimizer(
    config: _DionFamilyConfig,
    model: nn.Module,
    device_mesh: Any = None,
    mesh_kwarg: str | None = "distributed_mesh",
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return ``(param_groups, mesh_kwargs)`` for the constructor of a Dion-family optimizer; builds none itself.

    ``mesh_kwargs`` maps ``mesh_kwarg`` to the one-dimensional mesh, or is empty without one.

    Raises:
        ValueError: as ``separate_param_groups``; a required attribute is missing; as ``get_dion_mesh``.
    """
    policy = getattr(config, "policy", DEFAULT)
    rates = config_rates(config)
    trainable, frozen = decide_roles(model, policy)
    _refuse_lost_head_rate(rates, trainable, frozen)
    groups = separate(trainable, rates, policy, transposed=transposed_rule(config))
    for group in groups:
        _log(group, rates)
    return groups, _mesh_kwargs(device_mesh, model, mesh_kwarg)


def _mesh_kwargs(device_mesh: Any, model: nn.Module, mesh_kwarg: str | None) -> dict[str, Any]:
    mesh = None if mesh_kwarg is None else get_dion_mesh(device_mesh, model)
    return {} if mesh is None else {mesh_kwarg: mesh}


def _log(group: dict[str, Any], rates: Rates) -> None:
    elements = sum(p.numel() for p in group["params"])
    algorithm, rate = group.get("algorithm", "the optimizer's own"), group.get("lr", rates.base)
    logger.info(
        "%s: algorithm %s, %d tensors, %d elements, lr %g",
        group["role"],
        algorithm,
        len(group["params"]),
        elements,
        rate,
    )


def _refuse_lost_head_rate(rates: Rates, trainable: list[Decision], frozen: list[Decision]) -> None:
    """Refuse a head's rate that would change nothing: the head is tied to the embedding, frozen, or not there."""
    if rates.lm_head is None or any(d.role == "lm_head" for d in trainable):
        return
    why = (
        "its head is frozen" if any(d.role == "lm_head" for d in frozen) else "it has no head apart from its embedding"
    )
    raise ValueError(f"lm_head_lr={rates.lm_head} was given for a model where {why}; allowed is None")


def is_dion_optimizer(optimizer_factory: Any) -> bool:
    """Return whether a class, an instance or a ``functools.partial`` of them is a Dion-family optimizer.

    Native (``sandbox.optim``) and upstream (``dion``) classes and their subclasses are; ``torch.optim.Muon`` is not.
    """
    while isinstance(optimizer_factory, functools.partial):
        optimizer_factory = optimizer_factory.func
    cls = optimizer_factory if isinstance(optimizer_factory, type) else type(optimizer_factory)
    homes = [base.__module__.split(".") for base in cls.__mro__ if issubclass(base, torch.optim.Optimizer)]
    return any(home[:1] == ["dion"] or home[:2] == ["sandbox", "optim"] for home in homes)


def build_optimizer(config: Any, model: nn.Module, device_mesh: Any = None) -> torch.optim.Optimizer:
    """Return the optimizer that ``config`` describes over ``model``; every group has role, param_names and initial_lr.

    Raises:
        ValueError: no trainable parameter, a rate that reaches none, no matrix at all under a Dion-family config.
    """
    if isinstance(config, Factory):
        return config.load()(model, **config.kwargs)
    rates, policy = config_rates(config), config.policy
    trainable, frozen = decide_roles(model, policy)
    _refuse_lost_head_rate(rates, trainable, frozen)
    if not trainable:
        raise ValueError("the model has no trainable parameter")
    backend = _resolve_backend(getattr(config, "backend", "native"), trainable[0].parameter.device.type)
    rule = transposed_rule(config, backend)
    groups = [g for g in separate_named(trainable, rates, policy, transposed=rule) if g["params"]]
    extra = [{"param_names": g.pop("param_names"), "reason": g.pop("reason"), "role": g["role"]} for g in groups]
    if isinstance(config, AdamWConfig):
        optimizer = _adamw(config, groups)
    else:
        mesh_kwarg = _MESH_KWARG.get(type(config), "distributed_mesh")
        optimizer = _dion_family(config, backend, groups, _mesh_kwargs(device_mesh, model, mesh_kwarg))
    for group, more in zip(optimizer.param_groups, extra, strict=True):
        group.update(more)
        group.setdefault("initial_lr", float(group["lr"]))
        _log(group, rates)
    sentence = None if isinstance(config, AdamWConfig) else low_share(groups)
    if sentence:
        _say_once(sentence)
    return optimizer


_say_once = functools.lru_cache(maxsize=256)(logger.warning)  # a sweep builds the same model many times


def _adamw(config: AdamWConfig, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    for group in groups:
        group.setdefault("algorithm", "adamw")
        if group["algorithm"] != "adamw":
            raise ValueError(
                f"an override with algorithm={group['algorithm']!r} was given under AdamWConfig; allowed is 'adamw'"
            )
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)


def _dion_family(
    config: Any, backend: str, groups: list[dict[str, Any]], mesh_kwargs: dict[str, Any]
) -> torch.optim.Optimizer:
    if backend == "dion":
        from . import upstream

        return upstream.build(config, groups, mesh_kwargs)
    from . import optim

    factory = getattr(optim, _NATIVE[type(config)])
    values = {
        f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _SETTLED | _UPSTREAM_ONLY
    }
    accepted = inspect.signature(factory).parameters
    if "no_compile" not in accepted:
        values.pop("no_compile")  # the native step is eager
    return factory(groups, **values, **mesh_kwargs)


def _resolve_backend(backend: str, device: str) -> str:
    if backend != "auto":
        return backend
    return "dion" if device == "cuda" and importlib.util.find_spec("dion") is not None else "native"


def resolve_auto(run: RunConfig) -> RunConfig:
    """Return ``run`` with every ``"auto"`` replaced by what it means on this machine.

    Raises:
        ValueError: CUDA is asked for where there is none.
    """
    cuda = torch.cuda.is_available()
    if run.device == "cuda" and not cuda:
        raise ValueError("device='cuda' was given on a machine without CUDA; allowed is 'cpu' or 'auto'")
    device = ("cuda" if cuda else "cpu") if run.device == "auto" else run.device
    fast = "bfloat16" if device == "cuda" else "float32"
    optimizer = run.optimizer
    if getattr(optimizer, "backend", None) == "auto":
        optimizer = replace(optimizer, backend=_resolve_backend("auto", device))
    if getattr(optimizer, "orthogonalize_dtype", None) == "auto":
        optimizer = replace(optimizer, orthogonalize_dtype=fast)
    context = getattr(run.model, "context", None) if run.context is None else run.context
    dtype = fast if run.dtype == "auto" else run.dtype
    return replace(run, device=device, dtype=dtype, optimizer=optimizer, context=context)


_separate_param_groups = separate_param_groups
_get_dion_mesh = get_dion_mesh
