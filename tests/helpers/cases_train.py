"""Cases of ``test_mesh_train``: the same run on one process and on a mesh; checkpoints across numbers of ranks."""

import atexit
import json
import math
import os
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch

import sandbox as sb
from sandbox.training.checkpoint import CheckpointFailed, complete
from sandbox.training.loop import train
from sandbox.training.world import World, open_mesh, part

OPTIMIZERS = {
    "muon-adamw": sb.MuonConfig(lr=0.02, embed_lr=0.01, lm_head_lr=0.01, scalar_lr=0.003),
    "normuon-lion": sb.NorMuonConfig(lr=0.01, scalar_opt="lion", scalar_lr=1e-3),
    "dion2-adamw": sb.Dion2Config(lr=0.02, scalar_lr=0.003),
    "dion-lion": sb.DionConfig(lr=0.01, scalar_opt="lion", scalar_lr=1e-3),
    "adamw": sb.AdamWConfig(lr=0.003),
}
CROSSED = {  # each rule with the other scalar optimizer too, for the curves alone
    "muon-lion": sb.MuonConfig(lr=0.02, scalar_opt="lion", scalar_lr=1e-3),
    "normuon-adamw": sb.NorMuonConfig(lr=0.01, scalar_lr=0.003),
    "dion2-lion": sb.Dion2Config(lr=0.02, scalar_opt="lion", scalar_lr=1e-3),
    "dion-adamw": sb.DionConfig(lr=0.01, scalar_lr=0.003),
}


def base(folder):
    text = Path(folder).parent / "numbers.txt"  # written by the test, for all numbers of ranks
    return sb.RunConfig(
        model=sb.ModelConfig(vocab_size=256, width=12, depth=2, heads=2, context=16, bias=True),
        data=sb.DataConfig(corpus=str(text), tokenizer="bytes"),
        steps=20, batch_size=8, device="cpu", eval_every=10, eval_tokens=256, grad_clip=1.0,
    )  # fmt: skip


def meshes(size):
    shapes = {"ddp": (size, 1), "fsdp": (1, size)} | ({"hsdp": (2, 2)} if size == 4 else {})
    return {name: sb.MeshConfig(dp_replicate=r, dp_shard=s) for name, (r, s) in shapes.items()}


def curves(size, folder):
    """Every optimizer on every mesh: losses, validation losses, norms."""
    answers = {}
    for name, optimizer in (OPTIMIZERS | CROSSED).items():
        run = replace(base(folder), optimizer=optimizer)
        for kind, mesh in ({"alone": None} if size == 1 else meshes(size)).items():
            record = train(replace(run, mesh=mesh))
            assert record.status == "finished", record.error
            answers[kind, name] = (record.curve["train_loss"], record.evaluations["val_loss"], record.rms)
    return answers


def mesh_of_one(size, folder):
    """The same code path with a mesh of one process: bit for bit the run without a mesh."""
    if size == 1:
        with_mesh = train(replace(base(folder), mesh=sb.MeshConfig()))
        return with_mesh.curve == train(base(folder)).curve


def checkpoints(size, folder):
    """Written at this number of ranks for the others to read; going on is bit for bit the straight run."""
    answers = {}
    for name in ("normuon-lion", "dion-lion", "adamw"):
        mesh = None if size == 1 else sb.MeshConfig(dp_shard=size)
        run = replace(base(folder), optimizer=OPTIMIZERS[name], mesh=mesh, checkpoint_every=8, eval_every=4)
        store = Path(folder).parent / f"{name}-{size}"
        straight = train(run, checkpoints=store)
        kept = [path.name for path in complete(store)]
        rest = []
        again = train(run, rest.append, checkpoints=store)
        answers[name] = (kept, len(rest), again.curve == straight.curve and again.evaluations == straight.evaluations)
    return answers


def other_sizes(size, folder):
    """Going on from what the launch before this one wrote, at another number of ranks."""
    answers, here = {}, Path(folder).parent
    for store in sorted(here.glob("*-[124]")):
        name, written = store.name.rsplit("-", 1)
        if int(written) == size:
            continue
        mesh = None if size == 1 else sb.MeshConfig(dp_shard=size)
        run = replace(base(folder), optimizer=OPTIMIZERS[name], mesh=mesh, checkpoint_every=100, eval_every=4)
        rest = []
        record = train(run, rest.append, checkpoints=store)
        answers[name, int(written)] = (len(rest), record.curve["train_loss"])
    return answers


def cut_off(size, folder):
    """Half a checkpoint, an unreadable one and one without its mark: the newest complete one before them is used."""
    store = Path(folder) / "cut"
    run = replace(base(folder), mesh=None if size == 1 else sb.MeshConfig(dp_shard=size), checkpoint_every=6)
    world = _rank(run)
    straight = train(run, checkpoints=store)
    if world == 0:
        shutil.copytree(store / "step-00000018", store / "step-00000019")
        (store / "step-00000019" / ".metadata").unlink()
        shutil.copytree(store / "step-00000018", store / ".step-00000020.partial")
        for path in (store / "step-00000018").glob("*.distcp"):
            path.write_bytes(b"")
    _wait(run)
    rest = []
    again = train(run, rest.append, checkpoints=store)
    return len(rest), again.curve == straight.curve


def _rank(run):
    if run.mesh is None:
        return 0
    with open_mesh(run.mesh, device="cpu") as mesh:
        return World(mesh).rank


def _wait(run):
    if run.mesh is not None:
        torch.distributed.barrier()


def full_disk(size, folder):
    """No file may grow beyond a few kB on one rank: an error on all, the earlier checkpoint intact, nothing half."""
    store = Path(folder) / "full"
    run = replace(base(folder), mesh=None if size == 1 else sb.MeshConfig(dp_shard=size), checkpoint_every=6)
    rank, old = _rank(run), resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(row):
        if row["step"] == 11 and rank == size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, old[1]))

    try:
        train(run, fill, checkpoints=store)
    except CheckpointFailed as error:
        told = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    _wait(run)
    left = sorted(path.name for path in store.iterdir())
    rest = []
    record = train(run, rest.append, checkpoints=store)
    return told, left, len(rest), record.status


def foreign(size, folder):
    """A folder that holds another run's checkpoints is refused."""
    store = Path(folder) / "cut"
    run = replace(base(folder), mesh=None if size == 1 else sb.MeshConfig(dp_shard=size), checkpoint_every=6, seed=1)
    try:
        train(run, checkpoints=store)
    except ValueError as error:
        return str(error)


def plans(size, folder):
    """Bytes held by each role and sent in a step: the plan's against the real ones, on this rank."""
    answers = {}
    for name, optimizer in {**OPTIMIZERS, "dion2-local": sb.Dion2Config(selection_scope="local")}.items():
        for kind, config in meshes(size).items():
            planned = sb.plan(sb.GPT(base(folder).model, device="meta"), optimizer, config)
            with open_mesh(config, device="cpu") as mesh:
                world = World(mesh)
                model = world.wrap(sb.GPT(base(folder).model))
                built = optimizer.build(model, world.optimizer_mesh(model))
                sent, ranks = [], getattr(built, "_ranks", None)  # none in one process, and with torch's AdamW
                for _ in range(2):
                    for p in model.parameters():
                        p.grad = torch.ones_like(p)
                    before = ranks.sent if ranks else 0
                    built.step()
                    sent.append(ranks.sent - before if ranks else 0)
                rank = (mesh["dp_shard"] if config.dp_shard > 1 else mesh["dp_replicate"]).get_local_rank()
            held = {}
            for group in built.param_groups:
                row = held.setdefault(group["role"], [0, 0])
                for p in group["params"]:
                    row[0] += part(p).nbytes
                    row[1] += sum(part(t).nbytes for t in built.state[p].values())
            own = planned.table[planned.table["rank"] == rank].set_index("role")
            expected = {role: [row["parameter_bytes"], row["state_bytes"]] for role, row in own.iterrows()}
            answers[kind, name] = (held == expected, sent[1], int(planned.ranks()["optimizer_sent"][rank]))
    return answers


def bad_batch(size, folder):
    try:
        train(replace(base(folder), mesh=sb.MeshConfig(dp_shard=size), batch_size=size + 1))
    except ValueError as error:
        return str(error)


def diverges_alike(size, folder):
    """A diverged run is a record on every rank."""
    wild = replace(base(folder), mesh=sb.MeshConfig(dp_shard=size), optimizer=sb.MuonConfig(lr=0.02, lm_head_lr=1e4))
    record = train(wild)
    assert not math.isnan(record.curve["train_loss"][0])
    return record.status, json.dumps(record.curve)


def closes(size, folder):
    """Runs that open their own process group leave no hook of torch behind; for gloo's threads see ``_threads``."""
    atexit.register(_threads, Path(folder) / f"threads{os.environ['RANK']}.json")  # the first to come is the last to go
    for mesh in meshes(size).values():
        train(replace(base(folder), mesh=mesh, steps=1))
    return sys.excepthook is sys.__excepthook__


def _threads(path):
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    path.write_text(json.dumps(sorted(names)))


def everything(size, folder):
    """All the above in one process group, which is opened and closed once; the first two cases open their own."""
    answers = {case.__name__: case(size, folder) for case in (closes, diverges_alike)}
    with open_mesh(sb.MeshConfig(dp_shard=size), device="cpu", timeout=60):
        for case in (curves, mesh_of_one, checkpoints, other_sizes, cut_off, foreign, full_disk, bad_batch, plans):
            answers[case.__name__] = case(size, folder)
    return answers


CASES = (everything,)
