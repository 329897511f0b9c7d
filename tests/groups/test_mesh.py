"""Which mesh an optimizer gets: PITFALLS 24 and 25, on stand-ins and on real meshes over a pretended world of 8."""

import math
import types

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from sandbox.groups.mesh import get_dion_mesh, parameter_mesh


class StandIn:
    """A mesh by its outside: axes with names and sizes; ``flat`` names the flattened ones that it also knows."""

    def __init__(self, flat=(), **axes):
        self.mesh_dim_names, self.shape, self.ndim, self.flat = tuple(axes), tuple(axes.values()), len(axes), flat

    def __getitem__(self, name):
        if name not in self.mesh_dim_names and name not in self.flat:
            raise KeyError(name)
        return f"axis {name}"

    def size(self):
        return math.prod(self.shape)


def test_no_mesh_is_none():
    assert get_dion_mesh(None) is None


@pytest.mark.parametrize("empty", [StandIn(dp_shard=0), StandIn(dp_replicate=0, dp_shard=2), (), {}, StandIn()])
def test_an_empty_mesh_is_none(empty):
    assert get_dion_mesh(empty) is None


@pytest.mark.parametrize("mesh", [object(), types.SimpleNamespace(ndim=1), StandIn(anything=4)])
def test_a_process_group_or_a_single_axis_is_taken_as_it_is(mesh):
    assert get_dion_mesh(mesh) is mesh


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        (StandIn(dp_replicate=2, dp_shard=4), "dp_shard"),
        (StandIn(dp_replicate=4, dp_shard=1), "dp_replicate"),
        (StandIn(dp_replicate=1, dp_shard=1), "dp_shard"),
        (StandIn(dp_shard=4, tp=1), "dp_shard"),
        (StandIn(pp=2, dp_replicate=2, dp_shard=4, cp=1, tp=1), "dp_shard"),
        (StandIn(dp_replicate=2, dp_shard=2, cp=2, flat=("dp_shard_cp",)), "dp_shard_cp"),
        (StandIn(dp_shard=1, cp=2, flat=("dp_shard_cp",)), "dp_shard_cp"),
        (StandIn(dp_replicate=2, dp_shard_cp=4), "dp_shard_cp"),
        (StandIn(dp=4, tp=1), "dp"),
        (StandIn(replicate=2, shard=2), "shard"),
    ],
    ids=lambda value: (
        getattr(value, "mesh_dim_names", None) and str(dict(zip(value.mesh_dim_names, value.shape, strict=True)))
    ),
)
def test_of_several_axes_the_names_choose_one(mesh, axis):
    assert get_dion_mesh(mesh) == f"axis {axis}"


def test_tensor_parallelism_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"'tp' of size 2.*no tensor parallelism"):
        get_dion_mesh(StandIn(dp_shard=2, tp=2))


def test_dion_takes_tensor_parallelism_by_another_argument():
    assert get_dion_mesh(StandIn(dp_shard=2, tp=2), tensor_parallel=True) == "axis dp_shard"


@pytest.mark.parametrize(
    ("mesh", "why"),
    [
        (types.SimpleNamespace(ndim=2, shape=(2, 2), mesh_dim_names=None), "unnamed axes"),
        (StandIn(inner=2, outer=2), "one of dp_shard_cp"),
        (StandIn(dp_shard=2, cp=2), "flatten dp_shard and cp"),
    ],
)
def test_axes_that_do_not_say_what_they_are_are_refused(mesh, why):
    with pytest.raises(ValueError, match=why):
        get_dion_mesh(mesh)


# --- Real meshes, real DTensors -----------------------------------------------------------------------------------


@pytest.fixture
def world():
    """A process group of 8 ranks in which nothing is sent; this process is rank 0."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    torch.distributed.destroy_process_group()


def layers():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def mesh_of(*sizes, names):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("sizes", "axis"), [((2, 4), "dp_shard"), ((8, 1), "dp_replicate"), ((1, 8), "dp_shard")])
def test_hsdp_gives_the_axis_that_shares_the_work(sizes, axis):
    mesh = mesh_of(*sizes, names=("dp_replicate", "dp_shard"))
    model = layers()
    fully_shard(model, mesh=mesh)
    for found in (get_dion_mesh(mesh), get_dion_mesh(mesh, model), parameter_mesh(model)):
        assert (found.ndim, found.mesh_dim_names, found.size()) == (1, (axis,), max(sizes))


@pytest.mark.usefixtures("world")
def test_the_parameters_own_placements_outrank_names():
    mesh = mesh_of(2, 4, names=("dp_shard", "dp_replicate"))  # named the wrong way round
    model = layers()
    fully_shard(model, mesh=mesh)
    assert get_dion_mesh(mesh).mesh_dim_names == ("dp_shard",)
    assert get_dion_mesh(mesh, model).mesh_dim_names == ("dp_replicate",)


@pytest.mark.usefixtures("world")
def test_context_parallelism_gives_the_flattened_axis():
    mesh = mesh_of(2, 2, 2, names=("dp_replicate", "dp_shard", "cp"))
    with pytest.raises(ValueError, match="flatten dp_shard and cp"):
        get_dion_mesh(mesh)
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    model = layers()
    fully_shard(model, mesh=flat)
    for found in (get_dion_mesh(mesh), get_dion_mesh(mesh, model)):
        assert (found.ndim, found.mesh_dim_names, found.size()) == (1, ("dp_shard_cp",), 4)


@pytest.mark.usefixtures("world")
def test_parameters_on_one_axis_say_so_whatever_the_mesh_is_called():
    mesh = mesh_of(4, 2, names=("outer", "inner"))
    model = layers()
    fully_shard(model, mesh=mesh["outer"])
    assert get_dion_mesh(mesh, model) == mesh["outer"]


@pytest.mark.usefixtures("world")
def test_parameters_sharded_over_two_axes_are_refused():
    mesh = mesh_of(4, 2, names=("dp_shard", "columns"))
    model = layers()
    parallelize_module(model, mesh["columns"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    with pytest.raises(ValueError, match=r"'0.weight' is sharded over 2 axes"):
        get_dion_mesh(mesh, model)


@pytest.mark.usefixtures("world")
def test_matrices_on_different_meshes_are_refused():
    mesh = mesh_of(4, 2, names=("dp_shard", "ep"))
    model = layers()
    fully_shard(model[0], mesh=mesh["dp_shard"])
    fully_shard(model[1], mesh=mesh["ep"])
    with pytest.raises(ValueError, match=r"different meshes: 0.weight, 1.weight"):
        get_dion_mesh(mesh, model)


def test_a_model_in_one_process_lives_on_no_mesh():
    assert parameter_mesh(layers()) is None
