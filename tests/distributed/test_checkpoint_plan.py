"""Ranks plan together: all of them anew as soon as one of them has something else to save."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.load import resume
from slurm_forge.checkpoint.save import CheckpointWriter
from slurm_forge.checkpoint.state import TrainingState
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from tests.distributed.ranks import run_ranks

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
