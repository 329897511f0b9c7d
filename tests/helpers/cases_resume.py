"""The fourth launch of ``test_mesh_train``: four ranks go on from what two ranks wrote, and one."""

import sandbox as sb
from helpers import cases_train
from sandbox.training.world import open_mesh


def resumed(size, folder):
    with open_mesh(sb.MeshConfig(dp_shard=size), device="cpu", timeout=60):
        return cases_train.other_sizes(size, folder)


CASES = (resumed,)
