"""The native Dion family in plain PyTorch: the rules of https://github.com/microsoft/dion, at home on a CPU too."""

from .dion import Dion, dion_update
from .dion2 import Dion2, dion2_update
from .finite import NonFiniteGradient
from .muon import Muon, accumulate
from .normuon import NorMuon, normuon_update
from .orthogonalize import orthogonalize, orthogonalize_all

__all__ = [
    "Dion",
    "Dion2",
    "Muon",
    "NonFiniteGradient",
    "NorMuon",
    "accumulate",
    "dion2_update",
    "dion_update",
    "normuon_update",
    "orthogonalize",
    "orthogonalize_all",
]
