"""What the four optimizers share: groups, state, batching and the step. The rules themselves are pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..fields import near
from . import finite, lists, matrices, sharded
from .options import SCALAR, scale, translate
from .orthogonalize import Method, default_dtype, orthogonalize_all
from .scalar import adamw_, decay_, lion_

Orthogonalize = Callable[[list[Tensor]], list[Tensor]]  # stacks (N, m, n) -> as many of the same shapes
KERNELS = ("use_triton", "use_gram_newton_schulz", "triton_post_ortho")  # upstream's switches for its GPU kernels
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


class DionFamily(torch.optim.Optimizer):
    """What Muon, NorMuon, Dion2 and Dion share.

    Each group names its rule by ``algorithm``: this optimizer's own (the default), ``"adamw"`` or ``"lion"``. A group
    may also hold:

    - every constructor argument that is not about the optimizer as a whole (``lr``, ``weight_decay``, ...);
    - ``num_heads`` and ``split_sizes``, where the rule takes them;
    - ``transposed``: the weight is stored fan_in x fan_out;
    - ``role``, ``param_names`` and ``initial_lr``, which change no update.

    ``betas`` and ``eps`` are translated to ``beta1``, ``beta2`` and ``epsilon``. Any other key is an error. Rates and
    decays are plain numbers; a scheduler changes ``group["lr"]``.

    Every parameter has its state from the start, in the parameter's dtype and under upstream's names: ``momentum``;
    ``variance`` and ``step_dev`` (steps taken, 0-d float32) for AdamW; ``variance_neuron`` for NorMuon; ``Q`` for Dion.
    """

    algorithm: ClassVar[str]  # the matrix rule
    splits: ClassVar[tuple[str, ...]] = ()  # which of num_heads and split_sizes it takes
    extras: ClassVar[tuple[str, ...]] = ()  # state that the owner of a matrix needs
    returned: ClassVar[tuple[str, ...]] = ()  # state that the owner sends back
    own: ClassVar[tuple[str, ...]] = (  # attributes that a copy or a pickle keeps
        *("_dtype", "_method", "_function", "_options", "_numbers", "_ranks", "_owners"),
    )

    def _set_up(
        self,
        params: Any,
        mesh: Any,
        *,
        use_polar_express: bool = True,
        newton_schulz_func: Callable[..., Tensor] | None = None,
        orthogonalize_dtype: str = "auto",
        **options: Any,
    ) -> None:
        """Check all arguments, then hand the groups to torch, which calls ``add_param_group`` for each.

        ``options`` are the defaults of what a group may hold, and upstream's switches for GPU kernels, which must be
        off.
        """
        name = type(self).__name__
        for switch in KERNELS:
            if options.pop(switch, False):
                raise ValueError(
                    f"{name}: {switch}=True was given, a GPU kernel of upstream's; use backend='dion' for it"
                )
        self._ranks, self._owners = sharded.ranks_of(mesh, name), None
        if orthogonalize_dtype not in DTYPES:
            raise ValueError(
                f"{name}: orthogonalize_dtype={orthogonalize_dtype!r}: {near(str(orthogonalize_dtype), DTYPES)}"
            )
        if newton_schulz_func is not None and not callable(newton_schulz_func):
            raise ValueError(
                f"{name}: newton_schulz_func={newton_schulz_func!r} was given; allowed is f(matrices, epsilon=)"
            )
        self._dtype = DTYPES[orthogonalize_dtype]
        self._method: Method = "polar_express" if use_polar_express else "newton_schulz"
        self._function = newton_schulz_func
        self._numbers: dict[Tensor, int] = {}
        self._options = frozenset(options) - {"betas"} | {"beta1", "beta2", "transposed", *self.splits}
        options = translate(options, self._options, where=name)
        super().__init__(params, {**options, "algorithm": self.algorithm, "step": 0})

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle takes along: torch's own part and ours."""
        return super().__getstate__() | {key: getattr(self, key) for key in self.own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group (copied, not kept) and create the state of its parameters.

        Raises:
            ValueError: an unknown key or algorithm; a value that is not allowed; a parameter that the rule cannot take,
                or that the group holds twice.
        """
        where = f"{type(self).__name__} group {len(self.param_groups)}"
        group = translate(param_group, self._options, where=where)
        algorithm, allowed = group.get("algorithm", self.algorithm), (self.algorithm, *SCALAR)
        if algorithm not in allowed:
            raise ValueError(f"{where}: algorithm={algorithm!r} was given: {near(str(algorithm), allowed)}")
        for key in ("transposed", *matrices.SPLITS):
            if algorithm in SCALAR and group.get(key):
                raise ValueError(f"{where}: {key}={group[key]!r} was given, which {algorithm} has no use for")
        super().add_param_group(group)
        try:
            _check(self.param_groups[-1], where, self._ranks, is_matrix=algorithm == self.algorithm)
        except ValueError:
            self.param_groups.pop()
            raise
        self._owners = None  # the next step assigns owners again
        for p in self.param_groups[-1]["params"]:
            self.state[p] = self._new_state(p, self.param_groups[-1], self._number(p))

    def _new_state(self, p: Tensor, group: dict[str, Any], number: int) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step; ``number`` counts parameters from 0."""
        state = {"momentum": torch.zeros_like(p, requires_grad=False)}
        if group["algorithm"] == self.algorithm:
            more = self._matrix_state(p, group, number)
            return state | {key: sharded.place(p, key, whole) for key, whole in more.items()}
        if group["algorithm"] == "adamw":
            state["variance"] = torch.zeros_like(p, requires_grad=False)
            state["step_dev"] = torch.zeros((), dtype=torch.float32, device=p.device)
        return state

    def _matrix_state(self, p: Tensor, group: dict[str, Any], number: int) -> dict[str, Tensor]:
        """Return the state that a matrix has besides its momentum, uncut."""
        return {}

    def _accumulate(
        self, gradients: list[Tensor], momenta: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what the directions are computed from, and the next momenta.

        This is the elementwise part of the rule, so the tensors may have any shapes.
        """
        total = lists.add(momenta, gradients)
        return total, total

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state that this class, or upstream's class of the same name, has saved.

        Raises:
            ValueError: its groups have other sizes or algorithms than here, or a state tensor has another shape.
                Nothing is changed then.
        """
        _refuse_unlike(self.param_groups, self.state, state_dict)
        before = self.param_groups
        super().load_state_dict(state_dict)
        ids = iter(i for saved in state_dict["param_groups"] for i in saved["params"])
        for group, old in zip(self.param_groups, before, strict=True):
            group |= {key: value for key, value in old.items() if key not in group}  # upstream has fewer options
            for p in group["params"]:
                saved, loaded = state_dict["state"].get(next(ids), {}), self.state.get(p, {})
                # torch has cast the count to the dtype of p, and bfloat16 counts to 256 only; Dion upstream has none
                loaded["step_dev"] = torch.as_tensor(saved.get("step_dev", float(group["step"])))
                self.state[p] = fresh = self._new_state(p, group, self._number(p))
                for key in fresh.keys() & loaded.keys():
                    fresh[key].copy_(loaded[key])

    def _number(self, p: Tensor) -> int:
        """Return how many parameters were added before this one."""
        return self._numbers.setdefault(p, len(self._numbers))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step and return the closure's loss. A parameter without a gradient keeps its value and state.

        Raises:
            NonFiniteGradient: before anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._ranks is not None:
            sharded.step(self, self._ranks)
            return loss
        finite.check(self.param_groups)
        for group in self.param_groups:
            group["step"] += 1
            (self._step_matrices if group["algorithm"] == self.algorithm else self._step_scalars)(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Update a matrix group: decay with the unscaled rate, then subtract the direction with the scaled one."""
        lr = float(group["lr"])
        for bundle in matrices.bundles(group["params"], self.state, group):
            x = [t for batch in bundle for t in batch.x]
            momenta = [state["momentum"] for batch in bundle for state in batch.state]
            ahead, new = self._accumulate([g for batch in bundle for g in batch.g], momenta, group)
            directions = self._solve(bundle, ahead, group)
            if "momentum" not in self.returned:
                lists.copy_(momenta, new)
            rate = lr * float(group["weight_decay"])
            decay_(x, list(itertools.chain(*directions)), rate=rate, cautious=group["cautious_wd"])
            for batch, direction in zip(bundle, directions, strict=True):
                lists.add_(batch.x, direction, alpha=-lr * scale(batch.shape, group.get("adjust_lr", "spectral_norm")))

    def _solve(self, bundle: list[matrices.Batch], ahead: list[Tensor], group: dict[str, Any]) -> list[list[Tensor]]:
        """Return the directions of each batch from what was accumulated for all of them, and write their new state."""
        rest = iter(ahead)
        stacks = [matrices.stack(list(itertools.islice(rest, len(b.x))), b.shape) for b in bundle]
        old = [batch.old(self.extras) for batch in bundle]
        directions, new = self._directions(stacks, old, group, self._orthogonalizer(group))
        for batch, state in zip(bundle, new, strict=True):
            for key, value in state.items():
                batch.set(key, value)
        return [matrices.like(direction, batch.x) for batch, direction in zip(bundle, directions, strict=True)]

    def _directions(
        self, ahead: list[Tensor], state: list[dict[str, Tensor]], group: dict[str, Any], orthogonalize: Orthogonalize
    ) -> tuple[list[Tensor], Sequence[dict[str, Tensor]]]:
        """Return the directions and the next state of stacks of matrices, one stack a shape. This is the rule."""
        raise NotImplementedError

    def _orthogonalizer(self, group: dict[str, Any]) -> Orthogonalize:
        """Return the function that the rule orthogonalizes stacks with."""
        function = self._function
        if function is None:
            return lambda us: orthogonalize_all(us, method=self._method, dtype=self._dtype, epsilon=group["epsilon"])

        def custom(u: Tensor) -> Tensor:
            """Call the user's function as upstream does: three dimensions, ``epsilon`` by name."""
            result = function(u.to(self._dtype or default_dtype(u)), epsilon=group["epsilon"])
            if result.shape != u.shape:
                raise ValueError(
                    f"newton_schulz_func made {tuple(result.shape)} of {tuple(u.shape)}; needed is the same"
                )
            return result.to(u.dtype)

        return lambda us: [custom(u) for u in us]

    def _step_scalars(self, group: dict[str, Any], state: Mapping[Tensor, dict[str, Tensor]] | None = None) -> None:
        """Update an AdamW or Lion group, one dtype and device at a time; ``state`` replaces the optimizer's."""
        state = self.state if state is None else state
        kinds: dict[Any, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None and p.numel():
                kinds.setdefault((p.dtype, p.device), []).append(p)
        numbers = {key: float(group[key]) for key in ("lr", "beta1", "beta2", "weight_decay")}
        for x in kinds.values():
            states = [state[p] for p in x]
            gradients = [p.grad.to(p.dtype) for p in x if p.grad is not None]
            common = {**numbers, "m": [s["momentum"] for s in states], "cautious": group["cautious_wd"]}
            if group["algorithm"] == "lion":
                lion_(x, gradients, **common)
                continue
            steps, v = [s["step_dev"] for s in states], [s["variance"] for s in states]
            adamw_(x, gradients, v=v, steps=steps, epsilon=float(group["epsilon"]), **common)


def _check(group: Mapping[str, Any], where: str, ranks: Any, *, is_matrix: bool) -> None:
    """Raise a ValueError for a parameter that this group cannot take."""
    if len(set(group["params"])) < len(group["params"]):
        raise ValueError(f"{where} holds a parameter twice; allowed is once")
    for i, p in enumerate(group["params"]):
        name = f"{where}: {finite.name_of(group, i)}"
        if not p.dtype.is_floating_point:
            raise ValueError(f"{name} has dtype {p.dtype}; allowed are floating-point parameters")
        sharded.check(p, ranks, where=name)
        if is_matrix:
            matrices.check(p, group, where=name)


def _refuse_unlike(groups: list[dict[str, Any]], state: Mapping[Tensor, Any], state_dict: Mapping[str, Any]) -> None:
    """Raise a ValueError where a saved state is of another algorithm or shape; torch compares the group sizes."""
    for number, (group, saved) in enumerate(zip(groups, state_dict["param_groups"], strict=False)):
        if saved.get("algorithm", group["algorithm"]) != group["algorithm"]:
            raise ValueError(f"group {number} is {saved['algorithm']!r} in the state, {group['algorithm']!r} here")
        for i, (p, key) in enumerate(zip(group["params"], saved["params"], strict=False)):
            for name, value in state_dict["state"].get(key, {}).items():
                here = state.get(p, {}).get(name)
                if here is not None and torch.is_tensor(value) and value.shape != here.shape:
                    shapes = f"{tuple(value.shape)} in the state, {tuple(here.shape)} here"
                    raise ValueError(f"{name} of {finite.name_of(group, i)} has shape {shapes}")
