"""What a plan says without any launch; that it is right to the byte is held by ``test_mesh_train``."""

import math

import pytest
import torch

import sandbox as sb
from sandbox.groups.mesh import MeshShape, get_dion_mesh
from sandbox.optim.owners import assign, cuts, operations

MODEL = sb.ModelConfig(vocab_size=256, width=32, depth=3, heads=2)
FAMILY = [sb.MuonConfig(), sb.NorMuonConfig(), sb.Dion2Config(), sb.DionConfig()]


@pytest.fixture
def model():
    """A model without storage."""
    return sb.GPT(MODEL, device="meta")


def test_cuts_are_those_of_torch_chunk():
    for rows in (1, 3, 5, 8, 18):
        for ranks in (1, 2, 4, 7):
            sizes = [len(part) for part in torch.zeros(rows).chunk(ranks)]
            assert cuts(rows, ranks) == sizes + [0] * (ranks - len(sizes))


def test_owners_share_the_work_within_the_bound_of_graham():
    costs = [float(n * n % 17 + 1) for n in range(50)]
    for ranks in (2, 3, 8):
        owners = assign(costs, ranks)
        loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
        assert max(loads) <= 4 / 3 * max(sum(costs) / ranks, max(costs))
        assert owners == assign(list(costs), ranks)


def test_operations_of_a_square_matrix_are_five_steps_of_three_products():
    assert operations((64, 64), {}, rule="muon") == 5 * 3 * 2 * 64**3
    assert operations((4, 64, 64), {}, rule="muon") == 4 * operations((64, 64), {}, rule="muon")
    assert operations((64, 64), {"fraction": 0.25}, rule="dion2") < operations((64, 64), {}, rule="muon") / 4


@pytest.mark.parametrize("config", FAMILY, ids=lambda c: type(c).__name__)
def test_one_process_holds_what_the_optimizer_holds_and_sends_nothing(config, model):
    planned = sb.plan(model, config, sb.MeshConfig())
    real = sb.GPT(MODEL)
    state = config.build(real).state.values()
    (row,) = planned.ranks().to_dict("records")
    assert row["parameter_bytes"] == sum(p.nbytes for p in real.parameters())
    assert row["state_bytes"] == sum(t.nbytes for s in state for t in s.values())
    assert row["optimizer_sent"] == row["model_sent"] == 0


@pytest.mark.parametrize("config", FAMILY, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("ranks", [2, 8])
def test_shards_share_memory_and_work_and_replicas_only_work(config, model, ranks):
    alone, sharded, copied = (
        sb.plan(model, config, mesh).ranks()
        for mesh in (sb.MeshConfig(), sb.MeshConfig(dp_shard=ranks), sb.MeshConfig(dp_replicate=ranks))
    )
    for name in ("parameter_bytes", "state_bytes"):
        assert sharded[name].max() == pytest.approx(alone[name].max() / ranks, rel=0.02)
        assert (copied[name] == alone[name].max()).all()
    for planned in (sharded, copied):
        assert planned["operations"].sum() == alone["operations"].sum()
        assert planned["operations"].max() < alone["operations"].max()


def test_more_ranks_than_matrices_show_as_imbalance(model):
    matrices = 3 * 6
    planned = sb.plan(model, sb.MuonConfig(), sb.MeshConfig(dp_shard=64))
    assert planned.imbalance > 64 / matrices
    assert sb.plan(model, sb.MuonConfig(), sb.MeshConfig(dp_shard=2)).imbalance < 1.05


def test_time_is_what_is_computed_and_sent_over_the_rates_given(model):
    planned = sb.plan(model, sb.MuonConfig(), sb.MeshConfig(dp_shard=2))
    slow, fast = (planned.seconds(tokens=1000, flops=1e12, bandwidth=b) for b in (1e9, 1e12))
    assert slow["model"] == 6 * planned.elements * 1000 / 2 / 1e12
    assert slow["optimizer_sent"] == pytest.approx(1000 * fast["optimizer_sent"])
    assert 0 < fast["communication"] < slow["communication"] < 1
    parts = {name: value for name, value in slow.items() if name != "communication"}
    assert math.isclose(slow["communication"], (parts["model_sent"] + parts["optimizer_sent"]) / sum(parts.values()))


def test_an_optimizer_of_ones_own_has_no_plan(model):
    with pytest.raises(ValueError, match="allowed are MuonConfig"):
        sb.plan(model, sb.Factory(name="torch.optim:SGD"), sb.MeshConfig())


def test_a_mesh_by_its_shape_alone_resolves_as_a_real_one_does():
    assert str(get_dion_mesh(MeshShape(dp_replicate=2, dp_shard=4))) == "dp_shard 4"
    assert str(get_dion_mesh(MeshShape(dp_shard=2, cp=2, flat={"dp_shard_cp": 4}))) == "dp_shard_cp 4"


def test_a_shard_axis_for_a_model_that_is_whole_is_refused():
    with pytest.raises(ValueError, match="call fully_shard first"):
        sb.MuonConfig().build(sb.GPT(MODEL), MeshShape(dp_replicate=2, dp_shard=4))
