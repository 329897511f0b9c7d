"""Parameter -> role (matrix, vector, embed, lm_head) for any PyTorch model, with the reason.

``sites``: where each parameter sits. ``names``: what its name means. ``tables``: which are embeddings and heads.
``overrides``: what the user says. ``decide`` puts them together.
"""

from ...config import Role
from .decide import DEFAULT, Decision, decide_roles, explain_roles, param_roles

__all__ = ["DEFAULT", "Decision", "Role", "decide_roles", "explain_roles", "param_roles"]
