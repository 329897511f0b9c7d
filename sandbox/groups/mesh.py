"""Which one-dimensional mesh a Dion-family optimizer takes.

It is the mesh that the parameters live on; without such parameters the names of the axes decide. Muon, NorMuon and
Dion2 spread their work over one axis (https://github.com/microsoft/dion, README). Axis names are
those of NVIDIA NeMo Automodel and torchtitan: pp, dp_replicate, dp_shard, cp, tp, and the flattened dp_shard_cp.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

_SHARD = ("dp_shard_cp", "dp_shard", "fsdp", "shard")  # the flattened one first: with cp > 1 parameters live on it
_REPLICATE = ("dp_replicate", "ddp", "replicate")
_DATA = ("dp_cp", "dp", "data_parallel", "data")
_TENSOR = ("tp", "tensor_parallel", "model_parallel")
_CONTEXT = ("cp", "context_parallel")


def get_dion_mesh(mesh: Any, model: Any = None, *, tensor_parallel: bool = False) -> Any:
    """Return the mesh for the optimizer's constructor: None, or one with a single axis.

    None and an empty mesh give None; a mesh without ``ndim`` (a process group) or with one axis is returned as it is.
    Of several axes it is the one that ``model``'s distributed parameters are sharded over; without such parameters the
    names decide: the shard axis, or the replicate axis where the shard axis has size 1 (else every rank would repeat
    all the work). ``tensor_parallel`` is for an optimizer that has another argument for tensor parallelism, as Dion.

    Raises:
        ValueError: tensor parallelism; context parallelism without a flattened axis; several axes without names, or
            with unknown ones; parameters that live on several axes or meshes.
    """
    if mesh is None or _is_empty(mesh):
        return None
    ndim = getattr(mesh, "ndim", None)
    if ndim is None or ndim == 1:
        return mesh
    sizes = _sizes(mesh)
    tensor = [name for name in _TENSOR if sizes.get(name, 1) > 1]
    if tensor and not tensor_parallel:
        raise ValueError(
            f"a mesh with the axis {tensor[0]!r} of size {sizes[tensor[0]]} was given: Muon, NorMuon and Dion2 take no "
            "tensor parallelism"
        )
    placed = None if model is None else parameter_mesh(model)
    return placed if placed is not None else _by_name(mesh, sizes)


def parameter_mesh(model: Any) -> Any:
    """Return the one-dimensional mesh that the model's distributed matrices live on, or None if it has none.

    Raises:
        ValueError: they are sharded over two axes of one mesh, or live on several meshes.
    """
    found: dict[Any, str] = {}  # mesh -> name of a parameter on it
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and parameter.requires_grad and hasattr(parameter, "placements"):
            found.setdefault(_axis(parameter, name), name)
    if len(found) > 1:
        raise ValueError(f"these parameters live on different meshes: {', '.join(found.values())}; allowed is one mesh")
    return next(iter(found), None)


def refuse_whole(mesh: Any, model: Any) -> None:
    """Refuse a model whose matrices are still whole although ``mesh`` is a shard axis.

    Sharding replaces the parameters, and an optimizer that was built before would never see the new ones.

    Raises:
        ValueError: the model is to be sharded before its optimizer is built.
    """
    name = (getattr(mesh, "mesh_dim_names", None) or ("",))[0]
    if name in _SHARD and mesh.size() > 1 and parameter_mesh(model) is None:
        raise ValueError(
            f"the mesh axis {name!r} of size {mesh.size()} was given for a model that is not sharded; call fully_shard "
            "first, then build the optimizer (of a DDP model, pass sandbox.world.process_group_of)"
        )


def _axis(parameter: Any, name: str) -> Any:
    """Return the axis of its mesh that shards a DTensor, or else an axis that holds copies of it."""
    mesh = parameter.device_mesh
    if mesh.ndim == 1:
        return mesh
    wide = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    sharded = [axis for axis in wide if not parameter.placements[axis].is_replicate()]
    if len(sharded) > 1:
        raise ValueError(f"{name!r} is sharded over {len(sharded)} axes of its mesh; allowed is one")
    if not mesh.mesh_dim_names:
        raise ValueError(f"{name!r} lives on a mesh of {mesh.ndim} unnamed axes; name them (dp_replicate, dp_shard)")
    return mesh[mesh.mesh_dim_names[(sharded or wide or [mesh.ndim - 1])[-1]]]


def _by_name(mesh: Any, sizes: dict[str, int]) -> Any:
    if any(sizes.get(name, 1) > 1 for name in _CONTEXT) and not any(name in sizes for name in ("dp_shard_cp", "dp_cp")):
        for name in ("dp_shard_cp", "dp_cp"):
            try:  # a flattened axis is known to its mesh without being one of its dimensions
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch asks to keep the flattened mesh; only its maker can
                    return mesh[name]
            except (KeyError, RuntimeError):
                continue
        raise ValueError(f"a mesh with the axes {sizes} was given; flatten dp_shard and cp, and pass that mesh itself")
    known = (*_SHARD, *_REPLICATE, *_DATA)
    wide = [name for name in known if sizes.get(name, 0) > 1]
    found = wide or [name for name in known if name in sizes]
    if not found:
        raise ValueError(f"a mesh with the axes {', '.join(sizes)} was given; one of {', '.join(known)} is needed")
    return mesh[found[0]]


def _sizes(mesh: Any) -> dict[str, int]:
    """Return the size of each named axis."""
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if not names:
        raise ValueError(
            f"a mesh of {mesh.ndim} unnamed axes was given; name them (dp_replicate, dp_shard) or pass the one axis"
        )
    shape = getattr(mesh, "shape", None)
    return dict(zip(names, shape if shape is not None else map(mesh.size, range(len(names))), strict=True))


def _is_empty(mesh: Any) -> bool:
    size = getattr(mesh, "size", None)
    size = size() if callable(size) else size
    return size == 0 or getattr(mesh, "ndim", None) == 0 or (hasattr(mesh, "__len__") and len(mesh) == 0)


class MeshShape:
    """A mesh that has only names and sizes of axes, so that ``get_dion_mesh`` can be asked without a process group.

    For example ``MeshShape(dp_replicate=2, dp_shard=4)``. ``flat`` gives names and sizes of flattened axes.
    """

    def __init__(self, flat: dict[str, int] | None = None, **axes: int) -> None:
        self.mesh_dim_names, self.shape, self.ndim = tuple(axes), tuple(axes.values()), len(axes)
        self._known = axes | (flat or {})

    def __getitem__(self, name: str) -> MeshShape:
        return MeshShape(None, **{name: self._known[name]})

    def __repr__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in zip(self.mesh_dim_names, self.shape, strict=True))

    def size(self, axis: int | None = None) -> int:
        """Return the size of one axis, or of all together."""
        return math.prod(self.shape) if axis is None else self.shape[axis]
