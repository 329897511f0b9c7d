"""The one shell of the family: groups, state, batching and the step. The rules themselves are pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..fields import near
from . import lists
from .matrices import batches, check
from .options import SCALAR, scale, translate
from .orthogonalize import orthogonalize
from .scalar import adamw_, decay_, lion_

Orthogonalize = Callable[[Tensor], Tensor]  # (N, ..., m, n) -> the same shape
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


class NonFiniteGradient(ValueError):
    """A gradient holds nan, inf, or a number within a factor of 100 of its dtype's largest; nothing was changed."""


class DionFamily(torch.optim.Optimizer):
    """What Muon, NorMuon, Dion2 and Dion share.

    A group names its rule by ``algorithm``: this optimizer's own (the default), ``"adamw"`` or ``"lion"``. It may hold
    every constructor argument that is not about the whole optimizer, ``num_heads`` or ``split_sizes`` where the rule
    takes them, ``transposed`` (the weight is stored fan_in x fan_out), and ``role``, ``param_names``, ``initial_lr``.
    ``betas`` and ``eps`` are translated to ``beta1``, ``beta2``, ``epsilon``; any other key is an error. Rates and
    decays stay plain numbers; a scheduler changes ``group["lr"]``.

    State exists for every parameter from construction, in its dtype, under upstream's names: ``momentum``;
    ``variance`` and ``step_dev`` (float32 step count) for AdamW; ``variance_neuron`` for NorMuon; ``Q`` for Dion.
    """

    algorithm: ClassVar[str]  # the matrix rule
    splits: ClassVar[tuple[str, ...]] = ()  # which of num_heads, split_sizes it takes
    state_keys: ClassVar[tuple[str, ...]] = ("momentum",)  # of a matrix parameter

    def _set_up(
        self,
        params: Any,
        *,
        mesh: Any,
        kernels: Mapping[str, bool],
        defaults: dict[str, Any],
        use_polar_express: bool = True,
        newton_schulz_func: Callable[..., Tensor] | None = None,
        orthogonalize_dtype: str = "auto",
    ) -> None:
        """Check all arguments, then hand the groups to torch, which calls ``add_param_group`` for each."""
        name = type(self).__name__
        for switch, on in kernels.items():
            if on:
                raise ValueError(
                    f"{name}: {switch}=True was given, a GPU kernel of upstream's; use backend='dion' for it"
                )
        _refuse_mesh(mesh, name)
        if orthogonalize_dtype not in DTYPES:
            raise ValueError(
                f"{name}: orthogonalize_dtype={orthogonalize_dtype!r}: {near(str(orthogonalize_dtype), DTYPES)}"
            )
        if newton_schulz_func is not None and not callable(newton_schulz_func):
            raise ValueError(
                f"{name}: newton_schulz_func={newton_schulz_func!r} was given; allowed is f(matrices, epsilon=)"
            )
        self._dtype = DTYPES[orthogonalize_dtype]
        self._method = "polar_express" if use_polar_express else "newton_schulz"
        self._function = newton_schulz_func
        self._options = frozenset(defaults) - {"betas"} | {"beta1", "beta2", "transposed", *self.splits}
        defaults = translate(defaults, self._options, where=name)
        super().__init__(params, {**defaults, "algorithm": self.algorithm, "step": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group (copied, not kept) and create the state of its parameters.

        Raises:
            ValueError: an unknown key or algorithm, a value that is not allowed, a parameter that the rule cannot take
                or that stands in two groups.
        """
        where = f"{type(self).__name__} group {len(self.param_groups)}"
        group = translate(param_group, self._options, where=where)
        algorithm = group.get("algorithm", self.algorithm)
        if algorithm not in (self.algorithm, *SCALAR):
            raise ValueError(
                f"{where}: algorithm={algorithm!r} was given: {near(str(algorithm), (self.algorithm, *SCALAR))}"
            )
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            for i, p in enumerate(group["params"]):
                self._check(p, group, f"{where}: {_name(group, i)}")
        except ValueError:
            self.param_groups.pop()
            raise
        for p in group["params"]:
            self.state[p] = self._new_state(p, group)

    def _check(self, p: Tensor, group: dict[str, Any], where: str) -> None:
        if not p.dtype.is_floating_point:
            raise ValueError(f"{where} has dtype {p.dtype}; allowed are floating-point parameters")
        if hasattr(p, "placements"):
            raise ValueError(f"{where} is a DTensor; native optimizers on sharded parameters are not built yet")
        if group["algorithm"] == self.algorithm:
            check(p, group, where=where)

    def _new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        state = {"momentum": torch.zeros_like(p, memory_format=torch.preserve_format).detach_()}
        if group["algorithm"] == "adamw":
            state["variance"] = torch.zeros_like(state["momentum"])
            state["step_dev"] = torch.zeros((), dtype=torch.float32, device=p.device)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of upstream's class of the same name."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        ids = [i for g in state_dict["param_groups"] for i in g["params"]]
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        for i, (p, group) in zip(ids, params, strict=True):
            state = self.state.setdefault(p, {})
            if (
                group["algorithm"] == "adamw"
            ):  # torch has cast it to the dtype of p, where bfloat16 stops counting at 256
                count = saved.get(i, {}).get("step_dev", float(group["step"]))
                state["step_dev"] = torch.as_tensor(count, dtype=torch.float32, device=p.device).clone()
            for key, value in self._new_state(p, group).items():
                state.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients at hand; parameters without one keep value and state. Return the loss.

        Raises:
            NonFiniteGradient: before anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_non_finite()
        for group in self.param_groups:
            group["step"] += 1
            (self._step_matrices if group["algorithm"] == self.algorithm else self._step_scalars)(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        for batch in batches(group["params"], self.state, group, self.state_keys):
            old = {key: batch.stack(tensors) for key, tensors in batch.state.items()}
            direction, new = self._direction(batch.stack(batch.g), old, group, self._orthogonalizer(group))
            for key, value in new.items():
                _write(batch.state[key], value)
            steps = [d.reshape(x.shape) for d, x in zip(direction.unbind(), batch.x, strict=True)]
            decay_(batch.x, steps, rate=lr * decay, cautious=group["cautious_wd"])
            lists.add_(batch.x, steps, alpha=-lr * scale(batch.shape, group.get("adjust_lr", "spectral_norm")))

    def _direction(
        self, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any], orthogonalize: Orthogonalize
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    def _orthogonalizer(self, group: dict[str, Any]) -> Orthogonalize:
        """Return the function that a rule orthogonalizes a stack with."""
        epsilon = group["epsilon"]
        if self._function is None:
            return lambda u: orthogonalize(u, method=self._method, dtype=self._dtype, epsilon=epsilon)

        def custom(u: Tensor) -> Tensor:
            """Call the user's function as upstream does: at most three dimensions, and ``epsilon`` by name."""
            flat = u.reshape(-1, *u.shape[-2:])
            result = self._function(flat if self._dtype is None else flat.to(self._dtype), epsilon=epsilon)
            if result.shape != flat.shape:
                raise ValueError(
                    f"newton_schulz_func returned {tuple(result.shape)} for {tuple(flat.shape)}; needed is the same"
                )
            return result.reshape(u.shape)

        return custom

    def _step_scalars(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None and p.numel()]
        for same in _by_kind(params).values():
            states = [self.state[p] for p in same]
            gradients = [p.grad if p.grad.dtype == p.dtype else p.grad.to(p.dtype) for p in same]
            shared = {k: float(group[k]) for k in ("lr", "beta1", "beta2", "weight_decay")}
            shared |= {"m": [s["momentum"] for s in states], "cautious": group["cautious_wd"]}
            if group["algorithm"] == "lion":
                lion_(same, gradients, **shared)
            else:
                counts, v = [s["step_dev"] for s in states], [s["variance"] for s in states]
                adamw_(same, gradients, v=v, steps=counts, epsilon=float(group["epsilon"]), **shared)

    def _refuse_non_finite(self) -> None:
        """Raise if any gradient is not finite; one look at the device, whatever the number of parameters."""
        found = [(group, i, p.grad) for group in self.param_groups for i, p in enumerate(group["params"])
                 if p.grad is not None and p.numel()]  # fmt: skip
        if not found:
            return
        for group, i, g in found:
            if g.layout != torch.strided:
                raise ValueError(f"{_name(group, i)} has a gradient of layout {g.layout}; allowed are dense ones")
        largest = lists.norm([g for *_, g in found], float("inf"))
        room = [0.01 * torch.finfo(g.dtype).max for *_, g in found]
        values = [value.double() for value in largest]
        if len({v.device for v in values}) == 1:
            values = torch.stack(values).tolist()
        bad = [
            _name(group, i) for (group, i, _), value, most in zip(found, values, room, strict=True) if not value < most
        ]
        if bad:
            raise NonFiniteGradient(
                f"the gradient of {', '.join(bad)} is not finite (or about to overflow); nothing was changed"
            )


def _refuse_mesh(mesh: Any, name: str) -> None:
    """Let through what means one process; the seam where the sharded family starts."""
    size = mesh.size() if callable(getattr(mesh, "size", None)) else 1
    if mesh is not None and size != 1:
        raise ValueError(
            f"{name}: a mesh of {size} ranks was given; native optimizers on several ranks are not built yet"
        )


def _name(group: Mapping[str, Any], i: int) -> str:
    """Return what to call a parameter in an error."""
    if "param_names" in group:
        return repr(group["param_names"][i])
    return (
        f"parameter {i} of group {group.get('role') or group['algorithm']!r}, shape {tuple(group['params'][i].shape)}"
    )


def _by_kind(params: list[Tensor]) -> dict[Any, list[Tensor]]:
    found: dict[Any, list[Tensor]] = {}
    for p in params:
        found.setdefault((p.dtype, p.device), []).append(p)
    return found


def _write(targets: list[Tensor], stack: Tensor) -> None:
    lists.copy_(targets, [value.reshape(t.shape) for value, t in zip(stack.unbind(), targets, strict=True)])
