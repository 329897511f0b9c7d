"""Parameters -> roles -> optimizer groups -> optimizer.

``builder`` holds the contract of NVIDIA NeMo Automodel's ``components/optim/dion``; ``upstream`` is the second backend.
"""

from .builder import build_dion_optimizer, build_optimizer, is_dion_optimizer, separate_param_groups
from .mesh import get_dion_mesh
from .roles import explain_roles, param_roles
from .separate import Groups, check_complete, make_groups, role_groups
from .table import group_table

__all__ = [
    "Groups",
    "build_dion_optimizer",
    "build_optimizer",
    "check_complete",
    "explain_roles",
    "get_dion_mesh",
    "group_table",
    "is_dion_optimizer",
    "make_groups",
    "param_roles",
    "role_groups",
    "separate_param_groups",
]
