"""Mesh resolution under its short name. The code is in ``groups.mesh``."""

from .groups.mesh import MeshShape, get_dion_mesh, parameter_mesh, refuse_whole

_get_dion_mesh = get_dion_mesh

__all__ = ["MeshShape", "_get_dion_mesh", "get_dion_mesh", "parameter_mesh", "refuse_whole"]
