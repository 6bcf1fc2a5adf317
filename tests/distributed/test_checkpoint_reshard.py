"""Saved by n ranks, loaded by m, wrapped otherwise: the numbers are the same, bit for bit."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.checkpoint.write.save import save_checkpoint
from slurm_forge.errors import CheckpointError
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from tests.distributed.ranks import run_ranks
from tests.fsdp import fully_shard

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Sizes that no number of ranks divides; one dimension smaller than the number of ranks."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.middle = nn.Linear(13, 3)
        self.last = nn.Linear(3, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen.add_(1)
        return self.last(torch.tanh(self.middle(self.norm(self.first(x))))) * self.scale


class Ema:
    """A running mean of the weights that holds tensors as they are, sharded or not."""

    def __init__(self, model):
        self.model = model
        self.shadow = {name: p.detach().clone() for name, p in self.named()}

    def named(self):
        return [(n.removeprefix("module."), p) for n, p in self.model.named_parameters()]

    @torch.no_grad()
    def step(self):
        for name, parameter in self.named():
            self.shadow[name].lerp_(parameter, 0.1)

    def state_dict(self):
        return {"shadow": self.shadow, "decay": 0.9}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


def build(kind, seed):
    model = Net(seed)
    if kind in ("fsdp2", "hsdp"):
        world = dist.get_world_size()
        shape = (2, world // 2) if kind == "hsdp" else (world,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return model, optimizer, scheduler, Ema(model)


def state_of(parts, rank, world=None):
    model, optimizer, scheduler, ema = parts
    return TrainingState(
        models={"net": model},
        optimizers={"adam": optimizer},
        objects={"lr": scheduler, "ema": ema},
        extra={"world": world or dist.get_world_size()},
        rng={f"rng/rank-{rank}/torch": torch.get_rng_state()},
    )


def train(parts, steps, seed):
    model, optimizer, scheduler, ema = parts
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(12, 7, generator=generator)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        ema.step()


def digest(parts):
    """SHA-256 of every full tensor and every number of the training state."""
    model, optimizer, scheduler, ema = parts
    result = hashlib.sha256()

    def add(value):
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        result.update(value if isinstance(value, bytes) else repr(value).encode())

    for key, value in sorted(model.state_dict().items()):
        add(key.removeprefix("module."))
        add(value)
    for key, value in ema.shadow.items():
        add(key)
        add(value)
    for pid, entries in optimizer.state_dict()["state"].items():
        for key, value in sorted(entries.items()):
            add((pid, key))
            add(value)
    for group in optimizer.param_groups:
        add(sorted((k, v) for k, v in group.items() if k != "params"))
    add(sorted(scheduler.state_dict().items()))
    return result.hexdigest()


def first_save(rank, directory, kind):
    store = CheckpointStore(directory, "run")
    parts = build(kind, seed=1)
    train(parts, 3, seed=5)
    before = digest(parts)
    saved = save(store, state_of(parts, rank), step=1)
    assert digest(parts) == before, "saving changed the training state"
    return before, str(saved.name), saved.size, saved.disagreeing


def save(store, state, step):
    return save_checkpoint(
        store,
        state,
        name=CheckpointName.new(step=step, attempt=1, launch=1),
        reason="test",
        group=dist.group.WORLD,
        fence=lambda: None,
    )


def load_and_save_again(rank, directory, kind, step, warm):
    store = CheckpointStore(directory, "run")
    parts = build(kind, seed=2)
    if warm:
        train(parts, 2, seed=7)
    rejected = []
    state = state_of(parts, rank)
    loaded = resume(
        store, state, group=dist.group.WORLD, on_reject=lambda *why: rejected.append(why)
    )
    found = digest(parts)
    save(store, state, step=step)
    train(parts, 1, seed=9)
    return found, digest(parts), loaded.extra["world"], loaded.missing_rng, rejected


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_four_ranks_to_two_to_one_to_four(tmp_path, kind):
    directory = tmp_path / "checkpoints"
    results = run_ranks(4, first_save, directory, kind)
    (original, _, _, disagreeing), before = results[0], 4
    assert [r[0] for r in results] == [original] * 4 and len({r[1] for r in results}) == 1
    assert disagreeing == ()
    names = sorted(path.name for path in next(directory.iterdir()).iterdir())
    assert names == ["index.json", "manifest.json", *(f"rank-{r:05}.data" for r in range(4))]
    for step, world in ((2, 2), (3, 1), (4, 4), (5, 3)):
        results = run_ranks(world, load_and_save_again, directory, kind, step, step % 2 == 0)
        for rank, (found, _, saved_by, missing, rejected) in enumerate(results):
            assert found == original, f"{world} ranks loaded something else"
            assert saved_by == before and rejected == []
            assert missing == (() if rank < before else (f"rng/rank-{rank}/torch",))
        before = world


def test_between_plain_ddp_and_fsdp2(tmp_path):
    directory = tmp_path / "checkpoints"
    original = run_ranks(2, first_save, directory, "ddp")[0][0]
    for step, kind in ((2, "fsdp2"), (3, "plain"), (4, "fsdp2"), (5, "ddp")):
        results = run_ranks(2, load_and_save_again, directory, kind, step, False)
        assert {found for found, *_ in results} == {original}
        assert without_a_group(directory) == original


def without_a_group(directory):
    """Load the newest in this process, as a notebook would."""
    store, parts = CheckpointStore(directory, "run"), build("plain", seed=3)
    state = state_of(parts, 0, world=1)
    assert resume(store, state, group=None, on_reject=lambda *why: pytest.fail(str(why)))
    return digest(parts)


def test_hybrid_sharding(tmp_path):
    directory = tmp_path / "checkpoints"
    original = run_ranks(4, first_save, directory, "hsdp")[0][0]
    shards = sorted(p.stat().st_size for p in next(directory.iterdir()).glob("*.data"))
    assert shards[-1] < 2 * shards[0], "both replicas write"
    for step, (world, kind) in enumerate([(2, "fsdp2"), (4, "hsdp"), (1, "plain")], start=2):
        results = run_ranks(world, load_and_save_again, directory, kind, step, True)
        assert {found for found, *_ in results} == {original}


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.core
def test_the_same_number_of_ranks_goes_on_exactly(tmp_path, kind):
    def straight(rank):
        parts = build(kind, seed=1)
        train(parts, 3, seed=5)
        train(parts, 1, seed=9)
        return digest(parts)

    directory = tmp_path / "checkpoints"
    expected = run_ranks(2, straight)
    run_ranks(2, first_save, directory, kind)
    assert [r[1] for r in run_ranks(2, load_and_save_again, directory, kind, 2, True)] == expected


OPTIMIZERS = {
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize(
    "name", ["fused adamw", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sgd", "adagrad"))]
)
def test_other_optimizers_under_fsdp2(tmp_path, name):
    def build_with(seed):
        model, _, _, ema = build("fsdp2", seed)
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), ema

    def write(rank):
        parts = build_with(1)
        train(parts, 3, seed=5)
        save(CheckpointStore(tmp_path / "c", "run"), state_of(parts, rank), step=1)
        before = digest(parts)
        train(parts, 2, seed=9)
        return before, digest(parts)

    def read(rank):
        store, parts = CheckpointStore(tmp_path / "c", "run"), build_with(2)
        assert resume(
            store, state_of(parts, rank), group=dist.group.WORLD,
            on_reject=lambda *why: pytest.fail(str(why)),
        )  # fmt: skip
        before = digest(parts)
        train(parts, 2, seed=9)
        return before, digest(parts)

    written = run_ranks(2, write)
    assert run_ranks(2, read) == written
    assert run_ranks(3, read)[0][0] == written[0][0]


def test_a_part_that_only_this_rank_has_is_refused(tmp_path):
    def body(rank):
        parts = build("fsdp2", 1)
        train(parts, 1, seed=5)
        weight = parts[0].first.weight
        parts[1].state[weight]["mine"] = weight.to_local().clone()
        with pytest.raises(CheckpointError, match="sharded over ranks and this tensor is not"):
            save(CheckpointStore(tmp_path / "c", "run"), state_of(parts, rank), step=1)
        return True

    assert run_ranks(2, body) == [True, True]


def test_buffers_of_one_rank_stay_together_under_ddp(tmp_path):
    """BatchNorm statistics differ between DDP's ranks until the next forward takes rank 0's."""
    directory = tmp_path / "checkpoints"

    def body(rank):
        model = DistributedDataParallel(nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(6))))
        torch.manual_seed(rank)
        model(torch.randn(8, 4))
        mine = {k: v.clone() for k, v in model.state_dict().items() if "running" in k}
        store = CheckpointStore(directory, "run")
        state = TrainingState(models={"m": model})
        saved = save(store, state, step=1)
        assert resume(
            store, state, group=dist.group.WORLD, on_reject=lambda *why: pytest.fail(str(why))
        )
        loaded = {k: v for k, v in model.state_dict().items() if "running" in k}
        return mine, loaded, saved.disagreeing

    results = run_ranks(3, body)
    first = results[0][0]
    assert not torch.equal(first["module.0.running_mean"], results[1][0]["module.0.running_mean"])
    for _, loaded, _ in results:
        assert all(torch.equal(loaded[key], first[key]) for key in first)


def test_replicated_tensors_are_written_once_and_by_all(tmp_path):
    def body(rank):
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))))
        store = CheckpointStore(tmp_path / "checkpoints", "run")
        saved = save(store, TrainingState(models={"m": model}), step=1)
        return {f.name: f.size for f in store.verify_manifest(saved.name).files}

    sizes = run_ranks(3, body)[0]
    shards = [size for name, size in sizes.items() if name.endswith(".data")]
    assert len(shards) == 3 and max(shards) < 1.2 * min(shards)
    assert sum(shards) < 1.6 * 12 * (64 * 64 + 64) * 4
