"""What several test files need: a corpus of a few seconds' worth, and a run that trains in well under a second."""

import os
from dataclasses import replace

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches a network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; two workers share two cores

import pytest

import sandbox as sb


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A file of 100 kB that a small model can learn something from."""
    path = tmp_path_factory.mktemp("corpus") / "numbers.txt"
    path.write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(4000)))
    return path


@pytest.fixture
def tiny(text_file):
    """A run of 12 steps on one CPU thread."""
    return sb.RunConfig(
        model=sb.ModelConfig(vocab_size=256, width=16, depth=1, heads=2, context=16),
        data=sb.DataConfig(corpus=str(text_file), tokenizer="bytes"),
        optimizer=sb.MuonConfig(lr=0.02, embed_lr=0.01, lm_head_lr=0.01, scalar_lr=0.003),
        steps=12,
        batch_size=4,
        device="cpu",
        eval_every=5,
        eval_tokens=256,
    )


@pytest.fixture
def endless(tiny):
    """The same run, long enough to be interrupted."""
    return replace(tiny, steps=1_000_000)
