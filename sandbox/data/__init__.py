"""Text -> tokens -> batches: corpora and tokenizers, and the stream of windows that every arm of an ablation sees."""

from .batches import Batch, batch, check, validation_batches
from .tokens import Ids, Tokens, load

__all__ = ["Batch", "Ids", "Tokens", "batch", "check", "load", "validation_batches"]
