"""Which one-dimensional mesh a Dion-family optimizer takes: what the parameters live on, else what axis names say.

Muon, NorMuon and Dion2 shard their work over one axis; https://github.com/microsoft/dion (README, "Device mesh").
"""

from __future__ import annotations

from typing import Any

_SHARD_NAMES = ("dp_shard_cp", "dp_shard", "fsdp", "shard")  # the flattened axis first: parameters live on it under CP
_REPLICATE_NAMES = ("dp_replicate", "ddp", "replicate")
_DATA_NAMES = ("dp_cp", "dp", "data_parallel")
_TENSOR_NAMES = ("tp", "tensor_parallel")


def get_dion_mesh(mesh: Any, model: Any = None) -> Any:
    """Return the mesh for the optimizer's constructor: None, or one with a single axis.

    None and an empty mesh give None; a mesh without ``ndim`` (a process group) or with one axis is returned as it is.

    Raises:
        ValueError: tensor parallelism, or several axes whose names do not say which one shards the parameters.
    """
    if mesh is None or _size(mesh) == 0:
        return None
    ndim = getattr(mesh, "ndim", None)
    if ndim is None or ndim == 1:
        return mesh
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if not names:
        raise ValueError(
            f"a mesh of {ndim} unnamed axes was given; name them (dp_replicate, dp_shard) or pass one axis"
        )
    sizes = {name: _size(mesh[name]) for name in names}
    for name in _TENSOR_NAMES:
        if sizes.get(name, 1) > 1:
            raise ValueError(
                f"the mesh axis {name!r} of size {sizes[name]} was given: "
                "Muon, NorMuon and Dion2 take no tensor parallelism"
            )
    for candidates in (_SHARD_NAMES, _REPLICATE_NAMES, _DATA_NAMES):
        for name in candidates:
            if sizes.get(name, 0) > 1:
                return mesh[name]
    for name in (*_SHARD_NAMES, *_REPLICATE_NAMES, *_DATA_NAMES):
        if name in sizes:
            return mesh[name]
    raise ValueError(
        f"a mesh with the axes {names} was given; one of {_SHARD_NAMES + _REPLICATE_NAMES + _DATA_NAMES} is needed"
    )


def _size(mesh: Any) -> int | None:
    size = getattr(mesh, "size", None)
    return size() if callable(size) else size
