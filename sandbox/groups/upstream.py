"""The optimizers of https://github.com/microsoft/dion, where that package is installed: ``backend="dion"``.

It is on no package index, and there the name ``dion`` belongs to nobody, so every install line here has the git
address. Facts about its constructors and rates are those of commit 0a059a4542e5aa74b40dcd1dce363836c7afcd48.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from ..config import Dion2Config, DionConfig, MuonConfig, NorMuonConfig

INSTALL = 'pip install "dion @ git+https://github.com/microsoft/dion.git@0a059a4542e5aa74b40dcd1dce363836c7afcd48"'

_COMMON = ("lr", "weight_decay", "betas", "epsilon")
_ITERATED = (*_COMMON, "adjust_lr", "flatten", "use_triton", "use_polar_express")
_ARGUMENTS = {  # config -> upstream's class, and the config fields that its constructor takes
    MuonConfig: ("Muon", (*_ITERATED, "cautious_wd", "mu", "nesterov")),
    NorMuonConfig: ("NorMuon", (*_ITERATED, "cautious_wd", "mu", "nesterov", "muon_beta2")),
    Dion2Config: ("Dion2", (*_ITERATED, "fraction", "ef_decay", "selection_scope")),
    DionConfig: ("Dion", (*_COMMON, "mu", "rank_fraction", "rank_multiple_of", "power_iters", "qr_method")),
}


def load() -> ModuleType:
    """Return upstream's module.

    Raises:
        RuntimeError: it is missing, does not import, or is another package; the message has the install line.
    """
    try:
        with warnings.catch_warnings():  # it imports torch's compiler, which warns about torch's own deprecations
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module("dion")
    except Exception as error:  # a broken triton or CUDA raises errors of many types
        raise RuntimeError(f"backend='dion' needs microsoft/dion, which did not import ({error}): {INSTALL}") from error
    for name, _ in _ARGUMENTS.values():
        cls = getattr(module, name, None)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise RuntimeError(
                f"backend='dion' needs microsoft/dion; the installed 'dion' has no optimizer {name}: {INSTALL}"
            )
    return module


def available() -> bool:
    """Return whether upstream can be imported here."""
    try:
        load()
    except RuntimeError:
        return False
    return True


def commit() -> str | None:
    """Return the commit from which pip installed upstream, else its version; None where it is not installed."""
    try:
        distribution = importlib.metadata.distribution("dion")
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return origin.get("vcs_info", {}).get("commit_id") or distribution.version


def build(
    config: MuonConfig | NorMuonConfig | Dion2Config | DionConfig,
    param_groups: Sequence[Mapping[str, Any]],
    mesh_kwargs: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """Return upstream's optimizer for ``config``. It orthogonalizes in bfloat16, whatever the config says.

    Upstream turns a group's rate into a float32 tensor, which a schedule would then change in place. Here the rate is a
    plain number again after every call. With ``no_compile`` the optimizer steps eagerly.

    Raises:
        RuntimeError: upstream is not installed.
        ValueError: an option that upstream would ignore without a word.
    """
    name, arguments = _ARGUMENTS[type(config)]
    module = load()
    if config.cautious_wd and "cautious_wd" not in arguments:
        raise ValueError(f"cautious_wd=True was given, which upstream's {name} does not know; use backend='native'")
    groups = [_group(group, number) for number, group in enumerate(param_groups)]
    cls = _adapted(getattr(module, name), eager=config.no_compile)
    optimizer = cls(groups, **{key: getattr(config, key) for key in arguments}, **mesh_kwargs)
    _set_rates(optimizer, [float(group.get("lr", config.lr)) for group in param_groups])
    return optimizer


def _group(group: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a copy with ``betas`` and ``eps`` in upstream's spelling; it would ignore them otherwise."""
    group = dict(group)
    if group.pop("transposed", False):
        raise ValueError(
            f"group {number}: transposed=True was given, which upstream does not know; use backend='native'"
        )
    if "betas" in group:
        group["beta1"], group["beta2"] = group.pop("betas")
    if "eps" in group:
        group["epsilon"] = group.pop("eps")
    return group


@functools.cache
def _adapted(cls: type[torch.optim.Optimizer], *, eager: bool) -> type[torch.optim.Optimizer]:
    """Return a subclass that keeps the rates as they were given and, if ``eager``, steps without the compiler.

    Upstream compiles functions by decorators, which ``torch.compiler.disable`` does not reach. The compiler's stance
    does reach them. It is set only while the optimizer's own code runs, not in the closure and not afterwards.
    """
    run = cls.step
    stance = functools.partial(torch.compiler.set_stance, "force_eager") if eager else contextlib.nullcontext

    @functools.wraps(cls.step)  # copies the mark that torch set when it added its hooks
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = [float(group["lr"]) for group in self.param_groups]
        try:
            with stance():
                run(self)
        finally:
            _set_rates(self, rates)
        return loss

    def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        cls.load_state_dict(self, state_dict)
        _set_rates(self, [float(group["lr"]) for group in state_dict["param_groups"]])

    members = {"step": step, "load_state_dict": load_state_dict, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), members)


def _set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
