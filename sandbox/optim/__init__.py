"""The native Dion family in plain PyTorch: the rules of https://github.com/microsoft/dion, at home on a CPU too."""

from .base import NonFiniteGradient
from .muon import Muon
from .orthogonalize import orthogonalize

__all__ = ["Muon", "NonFiniteGradient", "orthogonalize"]
