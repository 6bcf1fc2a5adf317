"""Ranks plan together: all of them anew as soon as one of them has something else to save."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.checkpoint.write import save as save_module
from slurm_forge.checkpoint.write.plan import Planner
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.errors import CheckpointError
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from tests.distributed.ranks import run_ranks
from tests.fsdp import fully_shard

pytestmark = pytest.mark.distributed


class Box:
    """Whatever tensors one likes, by name."""

    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


class Saves:
    """Saves of one writer on every rank; each is loaded again and compared."""

    def __init__(self, directory, rank, monkeypatch):
        self.store, self.rank, self.step = CheckpointStore(directory, "run"), rank, 0
        self.writer = CheckpointWriter(self.store, group=dist.group.WORLD)
        self.exchanges, real = [], Ranks.agree

        def counted(ranks, *args, doing):
            self.exchanges.append(doing)
            return real(ranks, *args, doing=doing)

        monkeypatch.setattr(Ranks, "agree", counted)

    def planned(self, tensors, rng):
        """Save and check; whether this rank planned."""
        self.step += 1
        self.exchanges.clear()
        name = CheckpointName.new(step=self.step, attempt=1, launch=1)
        keys = {f"rng/rank-{self.rank}/{name}": value for name, value in rng.items()}
        state = TrainingState(objects={"box": Box(tensors)}, rng=keys)
        self.writer.begin(state, name=name, reason="test", fence=lambda: None).result()
        planned = "Planning a checkpoint" in self.exchanges
        assert len(self.exchanges) == 2 + planned, self.exchanges

        fresh = Box({key: torch.zeros_like(value) for key, value in tensors.items()})
        loaded = resume(
            self.store, TrainingState(objects={"box": fresh}, rng=keys), group=dist.group.WORLD,
            on_reject=lambda *why: pytest.fail(str(why)),
        )  # fmt: skip
        assert loaded.manifest.step == self.step and loaded.missing_rng == ()
        assert all(torch.equal(loaded.rng[key], value) for key, value in keys.items())
        for key, value in tensors.items():
            assert fresh.tensors[key].placements == value.placements
            assert torch.equal(fresh.tensors[key].full_tensor(), value.full_tensor()), key
        return planned


def test_one_rank_that_changes_makes_all_plan_anew(tmp_path, monkeypatch):
    def body(rank):
        saves = Saves(tmp_path / "c", rank, monkeypatch)
        mesh = init_device_mesh("cpu", (2,))
        box = {"w": distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, [Shard(0)])}
        rng = {"torch": torch.arange(8)}
        found = [saves.planned(box, rng), saves.planned(box, rng)]
        for victim in (0, 1):
            if rank == victim:
                rng["cuda"] = torch.arange(3000)
            found += [saves.planned(box, rng), saves.planned(box, rng)]
            if rank == victim:
                rng["torch"] = torch.arange(10)  # only longer
            found += [saves.planned(box, rng), saves.planned(box, rng)]
        return found

    assert run_ranks(2, body) == [[True, False] * 5] * 2


@pytest.mark.core
def test_another_placement_is_planned_anew(tmp_path, monkeypatch):
    def body(rank):
        saves = Saves(tmp_path / "c", rank, monkeypatch)
        mesh, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        full, rng, found = torch.arange(36.0).reshape(6, 6), {"torch": torch.arange(8)}, []
        for where, placements in [
            (mesh, [Shard(0)]), (mesh, [Shard(1)]), (mesh, [Replicate()]),
            (square, [Shard(0), Shard(1)]), (square, [Shard(0), Replicate()]),
            (square, [Shard(1), Shard(0)]), (square, [Shard(0), Shard(0)]), (mesh, [Shard(0)]),
        ]:  # fmt: skip
            box = {"w": distribute_tensor(full + len(found), where, placements)}
            found += [saves.planned(box, rng), saves.planned(box, rng)]
        return found

    assert run_ranks(4, body) == [[True, False] * 8] * 4


def test_parts_that_some_ranks_have_nothing_of(tmp_path, monkeypatch):
    def body(rank):
        saves = Saves(tmp_path / "c", rank, monkeypatch)
        mesh = init_device_mesh("cpu", (4,))
        box = {
            f"{rows}x{columns}-{dim}": distribute_tensor(
                torch.randn(rows, columns), mesh, [Shard(dim)]
            )
            for rows in (0, 1, 3, 5)
            for columns in (0, 1, 3)
            for dim in (0, 1)
        }
        box["scalar"] = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
        return [saves.planned(box, {}), saves.planned(box, {})]

    assert run_ranks(4, body) == [[True, False]] * 4


class Block(nn.Module):
    """Parameters and buffers, and a child with both."""

    def __init__(self, size):
        super().__init__()
        self.norm = nn.BatchNorm1d(size)
        self.up = nn.Linear(size, size)
        self.register_buffer("mask", torch.ones(size))

    def forward(self, x):
        return self.up(self.norm(x * self.mask))


def train(module, adam):
    module(torch.randn(4, SIZE)).sum().backward()
    adam.step()
    adam.zero_grad()


SIZE = 256
WRAPPED = {
    "ddp": DistributedDataParallel,
    "fsdp": fully_shard,
    "hsdp": lambda net: fully_shard(
        net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("alike", "apart"))
    ),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_model_of_blocks_is_planned_once_and_its_size_is_known_before(
    tmp_path, monkeypatch, wrapped
):
    def body(rank):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(SIZE, SIZE), Block(SIZE), Block(SIZE), nn.Linear(SIZE, 3))
        net = WRAPPED[wrapped](net)
        adam = torch.optim.Adam(net.parameters())
        writer = CheckpointWriter(CheckpointStore(tmp_path / "c", "run"), group=dist.group.WORLD)
        asked, written = [], []
        for step in (1, 2):
            train(net, adam)
            rng = {f"rng/rank-{rank}/torch": torch.get_rng_state()}
            state = TrainingState(models={"net": net}, optimizers={"adam": adam}, rng=rng)
            name = CheckpointName.new(step=step, attempt=1, launch=1)
            flight = writer.begin(
                state,
                name=name,
                reason="test",
                fence=lambda: None,
                permit=lambda size, _: asked.append(size),
            )
            written.append(flight.result().size)
            monkeypatch.setattr(TrainingState, "_anew", lambda *_: pytest.fail("taken apart anew"))
            monkeypatch.setattr(Planner, "make", lambda *_: pytest.fail("planned anew"))
        return [round(size / real, 1) for size, real in zip(asked, written, strict=False)]

    assert run_ranks(2, body) == [[1.0, 1.0], []]


def test_the_size_is_right_where_one_rank_alone_has_something_else(tmp_path):
    def body(rank):
        net = DistributedDataParallel(nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(6))))
        writer = CheckpointWriter(CheckpointStore(tmp_path / "c", "run"), group=dist.group.WORLD)
        asked, written = [], []
        for step, changed in enumerate([None, None, 1, 0], start=1):
            rng = {f"rng/rank-{rank}/x": torch.zeros(step if rank == changed else 8)}
            state = TrainingState(models={"net": net}, rng=rng)
            if step == 1:
                writer.prepare(state)
            name = CheckpointName.new(step=step, attempt=1, launch=1)
            flight = writer.begin(
                state,
                name=name,
                reason="test",
                fence=lambda: None,
                permit=lambda size, _: asked.append(size),
            )
            written.append(flight.result().size)
        return [round(size / real, 1) for size, real in zip(asked, written, strict=False)]

    assert run_ranks(2, body) == [[1.0] * 4, []]


def test_a_rank_that_can_not_look_at_its_state_keeps_nobody_waiting(tmp_path, monkeypatch):
    def body(rank):
        writer = CheckpointWriter(CheckpointStore(tmp_path / "c", "run"), group=dist.group.WORLD)
        state = TrainingState(objects={"box": Box({"w": torch.ones(3)})})
        name = CheckpointName.new(step=1, attempt=1, launch=1)

        def begin():
            writer.begin(state, name=name, reason="test", fence=lambda: None).result()

        def fail(tensors):
            raise RuntimeError("no memory to look with")

        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(save_module, "infinite_by_design", fail)
            for attempt in (lambda: writer.prepare(state), begin):
                with pytest.raises(CheckpointError, match=r"rank 1: .*no memory to look with"):
                    attempt()
        begin()
        return len(writer._store.candidates())

    assert run_ranks(2, body) == [1, 1]
