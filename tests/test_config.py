"""A run's configuration: checked at construction, JSON both ways, one hash."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

import sandbox as sb
from sandbox.config import AdamWConfig, Dion2Config, DionConfig, Factory, GroupPolicy, NorMuonConfig, Override
from sandbox.fields import flatten, with_field

RUN = sb.RunConfig(device="cpu")
OPTIMIZERS = (sb.MuonConfig(), NorMuonConfig(), Dion2Config(), DionConfig(), AdamWConfig())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_a_run_survives_json(optimizer):
    policy = GroupPolicy(overrides=(Override(pattern="a", role="vector", lr=0.0),))
    run = dataclasses.replace(RUN, optimizer=dataclasses.replace(optimizer, policy=policy, lr=0.1))
    assert sb.RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_the_hash_is_the_same_in_another_process():
    code = "import sandbox as sb; print(sb.RunConfig(device='cpu').hash)"
    environment = {"PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout.strip() == RUN.hash


def test_auto_is_resolved_before_hashing():
    assert sb.RunConfig(device="auto").hash == sb.RunConfig().resolved().hash
    assert "auto" not in {v for v in flatten(sb.RunConfig().resolved().to_dict()).values() if isinstance(v, str)}


def test_whole_numbers_hash_like_floats():
    with_int, with_float = (dataclasses.replace(RUN, optimizer=sb.MuonConfig(lr=one)) for one in (1, 1.0))
    assert with_int.hash == with_float.hash
    assert dataclasses.replace(RUN, optimizer=sb.MuonConfig(lr=np.float64(1.0))).hash == with_float.hash


def test_a_run_without_a_mesh_keeps_the_hash_it_had_before_there_were_meshes():
    assert "mesh" not in RUN.to_dict()
    assert sb.RunConfig.from_dict(dataclasses.replace(RUN, mesh=sb.MeshConfig(dp_shard=2)).to_dict()).mesh.size == 2


def test_checkpoints_change_no_number_and_no_hash():
    run = dataclasses.replace(RUN, checkpoint_every=10)
    assert run.hash == RUN.hash
    assert sb.RunConfig.from_dict(run.to_dict()).checkpoint_every == 10


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(sb.RunConfig) if f.name != "checkpoint_every"])
def test_every_field_of_a_run_is_in_its_hash(name):
    other = {
        "model": sb.ModelConfig(width=32),
        "data": sb.DataConfig(tokenizer="bytes"),
        "optimizer": sb.MuonConfig(lr=0.5),
        "schedule": sb.ScheduleConfig(decay=0.5),
        "grad_clip": 1.0,
        "device": "cpu",
        "dtype": "bfloat16",
        "context": 64,
        "mesh": sb.MeshConfig(dp_shard=2),
    }.get(name)
    run = dataclasses.replace(RUN, **{name: getattr(RUN, name) + 1 if other is None else other})
    assert (run.hash == RUN.hash) == (name == "device")


BAD = {
    "MuonConfig.lr='fast'": lambda: sb.MuonConfig(lr="fast"),
    "MuonConfig.lr=nan": lambda: sb.MuonConfig(lr=float("nan")),
    "MuonConfig.lr=-0.1": lambda: sb.MuonConfig(lr=-0.1),
    "allowed is 'adamw' or 'lion'": lambda: sb.MuonConfig(scalar_opt="sgd"),
    "RunConfig.steps=0": lambda: sb.RunConfig(steps=0),
    "RunConfig.steps=1.5": lambda: sb.RunConfig(steps=1.5),
    "ModelConfig.tied=1": lambda: sb.ModelConfig(tied=1),
    "heads=3 was given for width=64": lambda: sb.ModelConfig(heads=3),
    "a sum of at most 1": lambda: sb.ScheduleConfig(warmup=0.6, decay=0.6),
    "did you mean 'embed_lr'": lambda: with_field(RUN, "optimizer.embd_lr", 1),
    "did you mean 'steps'": lambda: sb.RunConfig.from_dict({"stps": 3}),
    "allowed is MuonConfig or": lambda: sb.RunConfig(optimizer="muon"),
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_values_are_one_clear_sentence(sentence):
    with pytest.raises(ValueError) as caught:
        BAD[sentence]()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RUN.steps = 3


def test_the_reference_defaults_are_ours():
    muon = sb.MuonConfig()
    assert (muon.lr, muon.weight_decay, muon.scalar_opt, muon.scalar_betas, muon.scalar_eps) == (
        *(5e-4, 0.0, "adamw"),
        *((0.9, 0.999), 1e-8),
    )
    assert (muon.scalar_lr, muon.embed_lr, muon.lm_head_lr) == (None, None, None)
    assert (muon.mu, muon.betas, muon.epsilon, muon.adjust_lr) == (0.95, (0.9, 0.95), 1e-8, "spectral_norm")
    assert (muon.nesterov, muon.flatten, muon.use_triton) == (False, False, False)
    assert NorMuonConfig().muon_beta2 == 0.95
    assert (Dion2Config().fraction, Dion2Config().ef_decay) == (0.25, 0.95)
    dion = DionConfig()
    assert (dion.mu, dion.rank_fraction, dion.rank_multiple_of, dion.power_iters) == (0.95, 1.0, 1, 1)
    assert dion.qr_method == "rcqr"


def test_a_factory_names_what_a_worker_can_import():
    factory = Factory.of(json.dumps, indent=2)
    assert factory.load() is json.dumps
    assert Factory.from_dict(json.loads(json.dumps(factory.to_dict()))) == factory


def test_what_a_worker_cannot_import_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="put it in a module"):
        Factory.of(lambda: None)
    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        Factory(name="nowhere:model")
    with pytest.raises(ValueError, match="no attribute 'nothing'"):
        Factory(name="json:nothing")
    with pytest.raises(ValueError, match="JSON values"):
        Factory(name="json:dumps", kwargs={"x": object()})


def test_the_schedule_warms_up_holds_and_decays_towards_zero():
    factors = [sb.ScheduleConfig(warmup=0.1, decay=0.4).factor(step, 20) for step in range(20)]
    assert factors[:2] == [0.5, 1.0]
    assert factors[2:13] == [1.0] * 11
    assert factors[12:] == pytest.approx([(20 - step) / 8 for step in range(12, 20)])


def test_the_cosine_decays_more_slowly_at_its_ends():
    linear, cosine = (sb.ScheduleConfig(warmup=0, decay=1, shape=shape) for shape in ("linear", "cosine"))
    assert cosine.factor(1, 100) > linear.factor(1, 100)
    assert cosine.factor(50, 100) == pytest.approx(0.5)
    assert 0 < cosine.factor(99, 100) < linear.factor(99, 100)


def test_no_decay_keeps_the_rate():
    assert {sb.ScheduleConfig(warmup=0, decay=0).factor(step, 10) for step in range(10)} == {1.0}
