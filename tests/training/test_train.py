"""The loop: one config, one curve; rates keep their ratios; divergence is a record; nothing global moves."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

import sandbox as sb
from sandbox.config import Factory
from sandbox.training.loop import _Trainer, try_train


class CountingModel(torch.nn.Module):
    """A model from outside, with dropout and the global generator's initial weights."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.table = torch.nn.Embedding(vocab_size, width)
        self.mix = torch.nn.Linear(width, width)
        self.drop = torch.nn.Dropout(0.1)
        self.lm_head = torch.nn.Linear(width, vocab_size)

    def forward(self, ids_BT):
        return self.lm_head(self.drop(self.mix(self.table(ids_BT))))


class RootModel(CountingModel):
    """A model whose loss is finite while a gradient is not: the slope of a root at 0."""

    def __init__(self, vocab_size, width):
        super().__init__(vocab_size, width)
        self.zero = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids_BT):
        return super().forward(ids_BT) + self.zero.sqrt()


def plain_sgd(model, lr):
    """An optimizer from outside."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_equal_runs_give_equal_curves(tiny):
    first, second = sb.train(tiny), sb.train(tiny)
    assert first.curve == second.curve
    assert first.evaluations == second.evaluations
    assert first.rms == second.rms


def test_training_learns(tiny):
    record = sb.train(replace(tiny, steps=60))
    assert record.status == "finished"
    assert record.val_loss < record.curve["train_loss"][0] - 1


@pytest.mark.parametrize("change", [{"seed": 1}, {"data_seed": 1}])
def test_each_seed_changes_the_curve(tiny, change):
    assert sb.train(tiny).curve["train_loss"] != sb.train(replace(tiny, **change)).curve["train_loss"]


@pytest.mark.parametrize("scalar_opt", ["adamw", "lion"])
def test_arms_start_from_the_same_weights_and_batches(tiny, scalar_opt):
    other = replace(tiny, optimizer=sb.MuonConfig(lr=0.5, scalar_opt=scalar_opt))
    baseline = replace(tiny, optimizer=sb.AdamWConfig())
    assert sb.train(other).curve["train_loss"][0] == sb.train(baseline).curve["train_loss"][0]


def test_the_global_generators_and_threads_are_left_as_they_were(tiny):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    sb.train(replace(tiny, threads=2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_a_record_says_all_that_it_should(tiny):
    record = sb.train(tiny)
    assert record.hash == tiny.hash
    assert record.curve["step"] == list(range(1, 13))
    assert record.curve["tokens"][-1] == 12 * 4 * 16
    assert record.evaluations["step"] == [5, 10, 12]
    bits = record.evaluations["val_loss"][0] / math.log(2)  # one byte a token
    assert record.evaluations["val_bpb"][0] == pytest.approx(bits)
    assert {"data_ms", "forward_backward_ms", "optimizer_ms", "tokens_per_second", "peak_bytes"} <= record.timing.keys()
    assert record.environment.keys() >= {"corpus_hash", "tokenizer_hash", "backend", "versions", "threads", "commit"}
    assert {row["role"] for row in record.groups} == {"matrix", "vector", "embed", "lm_head"}
    json.dumps(record.to_dict(), allow_nan=False)


def test_rms_are_those_of_each_role(tiny):
    rms = pd.DataFrame(sb.train(tiny).rms)
    assert set(rms["role"]) == {"matrix", "vector", "embed", "lm_head"}
    gains = rms[(rms["role"] == "vector") & (rms["step"] == 5)].iloc[0]
    assert gains["weight"] == pytest.approx(1, abs=0.05)
    # A Muon update of a square matrix has RMS lr / sqrt(side): its singular values are about 1.
    square = rms[(rms["role"] == "matrix") & (rms["step"] == 5)].iloc[0]
    assert square["update"] == pytest.approx(0.02 / 4, rel=0.3)


def test_the_schedule_keeps_the_ratios_of_the_rates(tiny):
    seen, trainer = [], _Trainer(tiny.resolved())
    for step in range(12):
        trainer._step(step)
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        seen.append([rate / rates[0] for rate in rates])
    assert seen == [pytest.approx(seen[0])] * 12
    assert seen[0] == pytest.approx([1, 0.15, 0.5, 0.5])


def test_an_exploding_loss_is_a_record_with_its_curve(tiny):
    wild = replace(tiny, optimizer=sb.MuonConfig(lr=0.02, lm_head_lr=1e4), steps=50)
    record = sb.train(wild)
    assert record.status == "diverged"
    assert 1 < len(record.curve["step"]) < 50
    assert "training loss" in record.error
    assert math.isnan(record.val_loss)


def test_an_infinite_loss_is_a_record(tiny):
    wild = replace(tiny, optimizer=sb.MuonConfig(lr=1e30, lm_head_lr=1e30))
    record = sb.train(wild)
    assert record.status == "diverged"
    json.dumps(record.to_dict(), allow_nan=False)


def test_a_gradient_that_is_not_finite_is_a_record(tiny):
    record = sb.train(replace(tiny, model=Factory.of(RootModel, vocab_size=256, width=16), context=16))
    assert record.status == "diverged"
    assert "step 1" in record.error
    assert math.isfinite(record.curve["train_loss"][0])


def test_a_model_broken_by_its_last_update_is_diverged(tiny):
    run = replace(tiny, model=Factory.of(RootModel, vocab_size=256, width=16), context=16, steps=1)
    record = sb.train(replace(run, optimizer=Factory.of(plain_sgd, lr=0.1)))
    assert (record.status, len(record.curve["step"])) == ("diverged", 1)
    assert "validation loss" in record.error


def test_clipping_bounds_what_adamw_sees(tiny):
    free, clipped = (sb.train(replace(tiny, grad_clip=clip)) for clip in (None, 1e-3))
    norms = [pd.DataFrame(r.rms).query("role == 'matrix' and step == 5")["gradient"].item() for r in (free, clipped)]
    assert norms[1] < 1e-3 < norms[0] * 100


def test_on_step_observes_each_step(tiny):
    rows = []
    record = sb.train(tiny, on_step=rows.append)
    assert [row["train_loss"] for row in rows] == record.curve["train_loss"]
    assert [row["step"] for row in rows if "val_loss" in row] == [5, 10, 12]


def test_a_vocabulary_too_small_is_refused_before_training(tiny):
    steps = []
    with pytest.raises(ValueError, match="vocab_size=100 was given"):
        sb.train(replace(tiny, model=replace(tiny.model, vocab_size=100)), on_step=steps.append)
    assert steps == []


def test_a_corpus_that_is_missing_is_a_failed_record_in_a_sweep_and_an_error_alone(tiny):
    lost = replace(tiny, data=sb.DataConfig(corpus="/nowhere/text.txt"))
    with pytest.raises(FileNotFoundError, match=r"/nowhere/text\.txt"):
        sb.train(lost)
    record = try_train(lost)
    assert record.status == "failed"
    assert "/nowhere/text.txt" in record.error


def test_a_rate_for_a_tied_head_is_an_error(tiny):
    with pytest.raises(ValueError, match="lm_head_lr"):
        sb.train(replace(tiny, model=replace(tiny.model, tied=True)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_an_error(tiny):
    with pytest.raises(ValueError, match="cuda"):
        sb.train(replace(tiny, device="cuda"))


def test_bfloat16_trains_too(tiny):
    record = sb.train(replace(tiny, dtype="bfloat16"))
    assert record.status == "finished"
    assert record.curve["train_loss"] != sb.train(tiny).curve["train_loss"]


def test_a_model_and_an_optimizer_of_ones_own_train_by_name(tiny):
    run = replace(
        tiny,
        model=Factory.of(CountingModel, vocab_size=256, width=16),
        optimizer=Factory.of(plain_sgd, lr=0.1),
        context=16,
    )
    first, second = sb.train(run), sb.train(run)
    assert first.curve == second.curve
    assert first.curve["train_loss"] != sb.train(replace(run, seed=1)).curve["train_loss"]
    assert first.environment["backend"].endswith(":plain_sgd")
    ours = replace(run, optimizer=tiny.optimizer)
    assert {row["role"] for row in sb.train(ours).groups} == {"matrix", "vector", "embed", "lm_head"}


def test_an_optimizer_class_gets_one_group_a_role(tiny):
    record = sb.train(replace(tiny, optimizer=Factory(name="torch.optim:NAdam", kwargs={"lr": 0.01})))
    assert record.status == "finished"
    assert {row["role"] for row in record.groups} == {"matrix", "vector", "embed", "lm_head"}
    assert {row["lr"] for row in record.groups} == {0.01}


def test_a_model_of_ones_own_needs_a_context(tiny):
    with pytest.raises(ValueError, match="context=None was given"):
        sb.train(replace(tiny, model=Factory.of(CountingModel, vocab_size=256, width=16)))
