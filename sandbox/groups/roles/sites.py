"""Where each parameter of a model sits: canonical names, owning modules, repeated blocks.

A canonical name is the one that the unwrapped model would have: what ``torch.compile``, DDP, FSDP and activation
checkpointing add to names is removed. The time is linear in the number of modules.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from torch import nn

# Components that a wrapper puts into names, whatever it wraps (torch.compile, FSDP1, activation checkpointing).
_WRAPPER_PARTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_MODULE_WRAPPER = re.compile(r"DataParallel$|DDP$|Engine$")  # classes whose only child is called ``module``


class Place(NamedTuple):
    """One place where a parameter is registered."""

    parameter: nn.Parameter
    name: str  # canonical and dotted
    local: str  # the last component of the name
    module: nn.Module
    prefix: str  # the module's canonical name, dotted
    inside: bool  # within a repeated block

    @property
    def path(self) -> list[str]:
        """Return the components of the module's name."""
        return self.prefix.split(".") if self.prefix else []

    @property
    def label(self) -> str:
        """Return the component that names the parameter's purpose: not ``weight``, not a number in a list."""
        if self.local != "weight" and not self.local.isdigit():
            return self.local
        return next((part for part in reversed(self.path) if not part.isdigit()), "")


class Places(NamedTuple):
    """All places of a model, and its modules."""

    first: list[Place]  # of every parameter, in the order of ``named_parameters``
    also: dict[int, list[Place]]  # the other places of a tied parameter, by its ``id``
    modules: list[nn.Module]  # every module once, in the order of ``modules``

    def of(self, place: Place) -> list[Place]:
        """Return all places of the parameter whose first place is given."""
        return [place, *self.also.get(id(place.parameter), ())]


def find_places(model: nn.Module) -> Places:
    """Return where each parameter of ``model`` sits, looking at each module once."""
    found, seen = Places([], {}, []), set()
    stack: list[tuple[nn.Module, str, bool]] = [(model, "", False)]
    while stack:
        module, prefix, inside = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.modules.append(module)
        for local, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{local}" if prefix else local
                place = Place(parameter, name, local, module, prefix, inside)
                if id(parameter) in seen:
                    found.also.setdefault(id(parameter), []).append(place)
                else:
                    seen.add(id(parameter))
                    found.first.append(place)
        children = module._modules
        if children:
            blocks = _blocks(tuple(children))
            wraps = len(children) == 1 and "module" in children and _MODULE_WRAPPER.search(type(module).__name__)
            for part, child in reversed(children.items()):
                if child is not None:
                    hidden = wraps or part in _WRAPPER_PARTS
                    below = prefix if hidden else f"{prefix}.{part}" if prefix else part
                    # A bare layer in a list is no block: ``lm_heads.0``, or the last layer of a Sequential model.
                    stack.append((child, below, inside or (part in blocks and bool(child._modules))))
    return found


@functools.lru_cache(maxsize=4096)
def _blocks(parts: tuple[str, ...]) -> frozenset[str]:
    """Return the children that are repeated blocks by their names: ``0``, ``1``, ... or ``layer1``, ``layer2``, ..."""
    stems: dict[str, list[str]] = {}
    for part in parts:
        stem = part.rstrip("0123456789")
        if stem != part:
            stems.setdefault(stem, []).append(part)
    return frozenset(part for stem, found in stems.items() if len(found) > 1 or not stem for part in found)


@functools.lru_cache(maxsize=65536)
def words(name: str) -> tuple[str, ...]:
    """Return the lower-case words of a name component or a class name: ``LlamaRMSNorm`` -> llama, rms, norm."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return tuple(word for word in re.split(r"[_\W\d]+", split.lower()) if word)


def kind(module: nn.Module) -> str:
    """Return what a module is: by its class, or else by the last word of the class's name.

    One of embedding, linear, conv1d (it stores (in, out)), convolution, norm, custom.
    """
    return _kind(type(module))  # type: ignore[arg-type]  # mypy takes a class's __hash__ for that of its instances


@functools.lru_cache(maxsize=4096)
def _kind(cls: type[nn.Module]) -> str:
    for base, name in _KINDS.items():
        if issubclass(cls, base):
            return name
    if cls.__name__ == "Conv1D":  # transformers.pytorch_utils.Conv1D
        return "conv1d"
    return _LAST_WORDS.get((words(cls.__name__) or ("",))[-1], "custom")


_LAST_WORDS = {
    "norm": "norm",
    "embedding": "embedding",
    "embeddings": "embedding",
    "embed": "embedding",
    "linear": "linear",
    "router": "linear",
    "gate": "linear",
}
_KINDS: dict[type[nn.Module], str] = {
    nn.Embedding: "embedding",
    nn.EmbeddingBag: "embedding",
    nn.Linear: "linear",
    nn.RNNBase: "linear",
    nn.RNNCellBase: "linear",
    nn.MultiheadAttention: "linear",
    nn.modules.conv._ConvNd: "convolution",
    nn.LayerNorm: "norm",
    nn.GroupNorm: "norm",
    nn.modules.batchnorm._NormBase: "norm",
}
