"""What a run is: frozen dataclasses of plain values. Standard library only.

Every field is defined once. Its comment gives the unit, and what None means. Upstream's options keep upstream's names.
A config is changed by ``dataclasses.replace`` or by ``sb.grid``. The optimizer fields and their defaults come from
NVIDIA NeMo Automodel ``components/optim`` and https://github.com/microsoft/dion.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import typing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .fields import LATER, Config, at_least

if typing.TYPE_CHECKING:
    import torch

Role = Literal["matrix", "vector", "embed", "lm_head"]
ScalarOpt = Literal["adamw", "lion"]
AdjustLR = Literal["spectral_norm", "rms_norm"]
Backend = Literal["native", "dion", "auto"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The small GPT of ``model.GPT``."""

    vocab_size: int = at_least(2, 1024)  # rows of the embedding; at least as many as the tokenizer has ids
    width: int = at_least(1, 64)  # model dimension D
    depth: int = at_least(1, 2)  # blocks
    heads: int = at_least(1, 2)  # attention heads; divides width
    context: int = at_least(1, 128)  # tokens a window T
    mlp_ratio: int = at_least(1, 4)  # hidden width of the MLP, divided by width
    tied: bool = False  # True: the head uses the embedding's table
    positions: Literal["rotary", "learned"] = "rotary"
    bias: bool = False  # biases in all linear layers but the head
    embed_std: float = at_least(0, 1.0)  # initial standard deviation of the tables of tokens and of learned positions
    matrix_std: float = at_least(0, 1.0)  # of matrices inside the blocks, multiplied by 1/sqrt(fan_in)
    head_std: float = at_least(0, 0.02)  # initial standard deviation of the head; of the shared table if tied

    def __post_init__(self) -> None:
        """Check each field, then the fields that depend on each other."""
        super().__post_init__()
        if self.width % self.heads:
            raise ValueError(
                f"heads={self.heads} was given for width={self.width}; allowed is a number that divides the width"
            )
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ValueError(
                f"width={self.width} was given for heads={self.heads}; rotary positions need an even head width"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Which text, and how it becomes tokens."""

    corpus: str = "kjv"  # "kjv", "stdlib", or the path of a text file, a folder of text, a folder of .bin shards
    tokenizer: Literal["bpe", "bytes"] = "bpe"  # not used for .bin shards, which hold tokens already
    vocab_size: int = at_least(257, 1024)  # ids of the BPE tokenizer; "bytes" has 256, .bin shards have their own


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """Warm-up, constant rate, decay to 0. All groups share one factor, so that their ratios never change."""

    warmup: float = at_least(0, 0.05, 1)  # fraction of the steps
    decay: float = at_least(0, 0.3, 1)  # fraction of the steps, at the end; 0 keeps the rate constant
    shape: Literal["linear", "cosine"] = "linear"  # of the decay

    def __post_init__(self) -> None:
        """Check each field, then the fields that depend on each other."""
        super().__post_init__()
        if self.warmup + self.decay > 1:
            raise ValueError(f"warmup={self.warmup} and decay={self.decay} were given; allowed is a sum of at most 1")

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of every group's rate at ``step`` (counted from 0) of ``steps``: above 0, at most 1.

        With n = warmup * steps, the first step has 1/n and the last warm-up step has 1. The decay would reach 0 one
        step after the run.
        """
        up, down = self.warmup * steps, self.decay * steps
        if step + 1 < up:
            return (step + 1) / up
        left = steps - step
        if left >= down:
            return 1.0
        return left / down if self.shape == "linear" else 0.5 - 0.5 * math.cos(math.pi * left / down)


@dataclass(frozen=True, kw_only=True)
class Override(Config):
    """Sets the role of the parameters that ``pattern`` matches, and if wanted their rate, decay and algorithm."""

    pattern: str  # regular expression on the whole canonical name, or "package.module:predicate" of (name, parameter)
    role: Role
    lr: float | None = at_least(0, None)  # None: the role's own rate
    weight_decay: float | None = at_least(0, None)  # None: the role's own decay
    algorithm: ScalarOpt | None = None  # None: the role's own algorithm


@dataclass(frozen=True, kw_only=True)
class GroupPolicy(Config):
    """The choices in grouping where more than one answer is reasonable."""

    lm_head_rule: Literal["reference", "upstream"] = "reference"  # lr/sqrt(d_in) always, or for Lion only
    experts: Literal["scalar", "batched"] = "scalar"  # 3-D (E, m, n): role vector, or a batch of E matrices
    convolutions: Literal["scalar", "flatten"] = "scalar"  # role vector, or a matrix fan_out x (all other dims)
    adapters: Literal["matrix", "scalar"] = "matrix"  # low-rank factors such as lora_A, lora_B
    overrides: tuple[Override, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Factory(Config):
    """Your own model or optimizer, given by a name that can be imported, so that a worker process finds it too.

    For a model, the function is called with ``kwargs``. It returns a module whose forward takes ids ``(B, T)`` and
    returns logits ``(B, T, V)``, or an object with ``.logits``. For an optimizer, a function is called with the model
    and ``kwargs``; a class is called with one parameter group for each role and ``kwargs``.
    """

    name: str  # "package.module:function"
    kwargs: dict[str, Any] = field(default_factory=dict)  # JSON values only

    def __post_init__(self) -> None:
        """Check that the name can be imported and that the arguments are JSON values."""
        super().__post_init__()
        self.load()
        try:
            object.__setattr__(self, "kwargs", json.loads(json.dumps(self.kwargs)))
        except TypeError as error:
            raise ValueError(f"Factory kwargs {self.kwargs!r} were given; allowed are JSON values ({error})") from None

    def __hash__(self) -> int:
        """Return a hash of the content, as the other configs have."""
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    @classmethod
    def of(cls, function: typing.Callable[..., Any], **kwargs: Any) -> Factory:
        """Return the factory that names ``function``.

        Raises:
            ValueError: the function cannot be imported by name: a lambda, a function of a cell, a local function.
        """
        return cls(name=f"{function.__module__}:{function.__qualname__}", kwargs=kwargs)

    def load(self) -> typing.Callable[..., Any]:
        """Return the function that the factory names.

        Raises:
            ValueError: the name cannot be imported; the sentence says why.
        """
        module, _, function = self.name.partition(":")
        why = "'package.module:function' is needed"
        if module == "__main__" or "<" in function:
            why = "a worker process cannot import what a notebook cell or a function body defines; put it in a module"
        elif module and function:
            try:
                found = functools.reduce(getattr, function.split("."), importlib.import_module(module))
                if callable(found):
                    return found
                why = "it is not callable"
            except (ImportError, AttributeError) as error:
                why = str(error)
        raise ValueError(f"Factory name {self.name!r} was given, which cannot be imported by name: {why}")


def _builder() -> Any:
    """Return the room that builds optimizers and resolves "auto".

    The one import from a lower floor to a higher one. It stays because ``config.build(model)`` is the reference's
    interface, and it waits until the first call, so that a config by itself needs the standard library only.
    """
    from .groups import builder

    return builder


@dataclass(frozen=True, kw_only=True)
class _OptimizerConfig(Config):
    """What all optimizer configs share."""

    def build(self, model: torch.nn.Module, device_mesh: Any = None) -> torch.optim.Optimizer:
        """Return the optimizer of ``model``: separate its groups, resolve the mesh, and drop empty groups.

        Raises:
            ValueError: as ``groups.build_optimizer``.
        """
        return _builder().build_optimizer(self, model, device_mesh)


@dataclass(frozen=True, kw_only=True)
class DionFamilyConfig(_OptimizerConfig):
    """The fields that all Dion-family configs share. Names and defaults are the reference's."""

    lr: float = at_least(0, 5e-4)  # base rate, of the matrix group
    weight_decay: float = at_least(0, 0.0)  # of matrices and vectors; embed and lm_head have none
    scalar_opt: ScalarOpt = "adamw"  # the algorithm of the vector, embed and lm_head groups
    scalar_betas: tuple[float, float] = at_least(0, (0.9, 0.999), 1)
    scalar_eps: float | None = at_least(0, 1e-8)  # None: the optimizer's own epsilon
    scalar_lr: float | None = at_least(0, None)  # None: lr
    embed_lr: float | None = at_least(0, None)  # None: scalar_lr, else lr
    lm_head_lr: float | None = at_least(0, None)  # None: policy.lm_head_rule decides
    cautious_wd: bool = False  # decay only where update and weight agree in sign (arXiv 2510.12402); all groups
    no_compile: bool = False  # True: the step of this optimizer runs eagerly, with either backend
    backend: Backend = "native"  # "dion": upstream's package; "auto": upstream on CUDA where installed, else native
    policy: GroupPolicy = GroupPolicy()


@dataclass(frozen=True, kw_only=True)
class OrthogonalizedConfig(DionFamilyConfig):
    """The fields of the optimizers that orthogonalize by an iteration."""

    betas: tuple[float, float] = at_least(0, (0.9, 0.95), 1)  # of scalar groups without betas of their own
    epsilon: float = at_least(0, 1e-8)
    adjust_lr: AdjustLR | None = "spectral_norm"  # rate scale by shape; None: 1
    flatten: bool = False  # 3-D and more: one matrix fan_out x (all other dims), not a batch of matrices
    use_triton: bool = False  # a switch of the "dion" backend, for its kernels
    use_polar_express: bool = True  # False: Newton-Schulz coefficients
    orthogonalize_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 on CUDA


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OrthogonalizedConfig):
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon)."""

    mu: float = at_least(0, 0.95, 1)  # momentum
    nesterov: bool = False


@dataclass(frozen=True, kw_only=True)
class NorMuonConfig(OrthogonalizedConfig):
    """NorMuon (arXiv 2510.05491): Muon with a second moment for each row."""

    mu: float = at_least(0, 0.95, 1)  # momentum
    nesterov: bool = False
    muon_beta2: float = at_least(0, 0.95, 1)  # of the row-wise second moment


@dataclass(frozen=True, kw_only=True)
class Dion2Config(OrthogonalizedConfig):
    """Dion2 (arXiv 2512.16928): orthogonalizes a fraction of the rows, with error feedback."""

    fraction: float = at_least(0, 0.25, 1)  # of the rows (or columns: the shorter side) that are chosen each step
    ef_decay: float = at_least(0, 0.95, 1)  # the momentum of a chosen row is multiplied by it
    # For sharded matrices. "global": the exact top-k. "local": each rank chooses from its own rows, which is cheaper,
    # but the result depends on the number of ranks.
    selection_scope: Literal["global", "local"] = field(default="global", metadata=LATER)


@dataclass(frozen=True, kw_only=True)
class DionConfig(DionFamilyConfig):
    """Dion (arXiv 2504.05295): low-rank orthonormal updates by power iteration."""

    mu: float = at_least(0, 0.95, 1)  # error feedback
    betas: tuple[float, float] = at_least(0, (0.9, 0.95), 1)
    epsilon: float = at_least(0, 1e-8)
    rank_fraction: float = at_least(0, 1.0, 1)  # the rank, divided by the shorter side
    rank_multiple_of: int = at_least(1, 1)  # the rank is rounded up to a multiple of this
    power_iters: int = at_least(1, 1)
    qr_method: Literal["rcqr", "qr", "cqr"] = "rcqr"  # of the "dion" backend; the native one always uses an exact QR


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(_OptimizerConfig):
    """AdamW for every role: the baseline (``torch.optim.AdamW``; arXiv 1711.05101)."""

    lr: float = at_least(0, 1e-3)  # of the matrix group
    betas: tuple[float, float] = at_least(0, (0.9, 0.95), 1)
    eps: float = at_least(0, 1e-8)
    weight_decay: float = at_least(0, 0.0)  # of matrices and vectors; embed and lm_head have none
    scalar_lr: float | None = at_least(0, None)  # None: lr
    embed_lr: float | None = at_least(0, None)  # None: scalar_lr, else lr
    lm_head_lr: float | None = at_least(0, None)  # None: lr
    policy: GroupPolicy = GroupPolicy(lm_head_rule="upstream")


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Config):
    """The ranks of a run. The number of processes is the product of both sizes.

    DDP if only ``dp_replicate`` is above 1, FSDP2 if only ``dp_shard`` is, HSDP if both are. The names are those of
    NVIDIA NeMo Automodel.
    """

    dp_replicate: int = at_least(1, 1)  # copies of the model
    dp_shard: int = at_least(1, 1)  # ranks that share each copy

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.dp_replicate * self.dp_shard


OptimizerConfig = MuonConfig | NorMuonConfig | Dion2Config | DionConfig | AdamWConfig | Factory


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """One run: what decides its numbers, and ``checkpoint_every``, which does not."""

    model: ModelConfig | Factory = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: MuonConfig(lr=0.02, embed_lr=0.01, lm_head_lr=0.003, scalar_lr=0.003)
    )
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    steps: int = at_least(1, 200)  # of the optimizer
    batch_size: int = at_least(1, 16)  # windows in a step, over all ranks
    context: int | None = at_least(1, None)  # tokens in a window; None: the model's own context
    grad_clip: float | None = at_least(0, None)  # global norm; None: no clipping
    seed: int = at_least(0, 0)  # of the initial weights
    data_seed: int = at_least(0, 0)  # of the batches
    threads: int = at_least(1, 1)  # CPU threads of torch in this run
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if the machine has it
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of autocast; auto: bfloat16 on CUDA, float32 on CPU
    eval_every: int = at_least(1, 50)  # steps; the last step is always evaluated
    eval_tokens: int = at_least(1, 40_960)  # of validation text, rounded up to whole batches
    # The ranks of a run on several processes, see ``sb.launch``. None: one process without a mesh.
    mesh: MeshConfig | None = field(default=None, metadata=LATER)
    # Steps between checkpoints; None: no checkpoints. It changes no number, so it is not part of the hash.
    checkpoint_every: int | None = field(default=None, metadata=LATER | {"low": 1})

    @property
    def ranks(self) -> int:
        """The number of processes of the run."""
        return 1 if self.mesh is None else self.mesh.size

    def resolved(self) -> RunConfig:
        """Return the same run with every ``"auto"`` replaced by what it means on this machine."""
        return _builder().resolve_auto(self)

    @property
    def hash(self) -> str:
        """Sixteen hex digits of the resolved run, the same in every process and Python version on like machines."""
        values = replace(self.resolved(), checkpoint_every=None).to_dict()
        text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
