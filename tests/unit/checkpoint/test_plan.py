"""A plan is made once and used as long as it fits; what is saved is right either way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.checkpoint.content.shard_layout import (
    ALIGN,
    Shard,
    lay_out,
)
from slurm_forge.checkpoint.content.training_state import TrainingState
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.checkpoint.write.save import CheckpointWriter
from slurm_forge.store.identity import CheckpointName
from tests.unit.checkpoint.helpers import bitwise, no_fence, open_store


class Box:
    """Whatever tensors one likes, by name."""

    def __init__(self, tensors=None):
        self.tensors = {} if tensors is None else tensors

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


class Saves:
    """Saves of one writer, one after another, each checked by loading it."""

    def __init__(self, tmp_path, monkeypatch):
        self.store = open_store(tmp_path)
        self.writer = CheckpointWriter(self.store, group=None)
        self.exchanges, self.step, real = [], 0, Ranks.agree

        def counted(ranks, *args, doing):
            self.exchanges.append(doing)
            return real(ranks, *args, doing=doing)

        monkeypatch.setattr(Ranks, "agree", counted)

    def planned(self, state, check):
        """Save, load into something fresh, ``check`` that; whether a plan was made for it."""
        self.exchanges.clear()
        self.step += 1
        name = CheckpointName.new(step=self.step, attempt=1, launch=1)
        self.writer.begin(state, name=name, reason="test", fence=no_fence).result()
        planned = "Planning a checkpoint" in self.exchanges
        assert len(self.exchanges) == 2 + planned, self.exchanges
        assert check(lambda fresh: resume(
            self.store, fresh, group=None, on_reject=lambda *why: pytest.fail(str(why))
        ).manifest.step == self.step)  # fmt: skip
        return planned


@pytest.fixture
def saves(tmp_path, monkeypatch):
    return Saves(tmp_path, monkeypatch)


def save_box(saves, box):
    def check(load):
        fresh = Box({key: torch.zeros_like(value) for key, value in box.tensors.items()})
        assert load(TrainingState(objects={"box": fresh}))
        assert list(fresh.tensors) == list(box.tensors)
        return all(bitwise(fresh.tensors[key], value) for key, value in box.tensors.items())

    return saves.planned(TrainingState(objects={"box": box}), check)


def start():
    return Box({"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5), "c": torch.tensor(7)})


def test_a_state_that_keeps_its_shape_is_planned_once(saves):
    box = start()
    assert save_box(saves, box)
    for _ in range(3):
        box.tensors["a"].add_(1)
        box.tensors["b"] = torch.randn(5)  # another tensor of the same kind
        assert not save_box(saves, box)


CHANGES = {
    "a new tensor": lambda t: t.update(d=torch.full((1000,), 3.0)),
    "a tensor less": lambda t: t.pop("a"),
    "another name": lambda t: t.update(z=t.pop("c")),
    "more rows": lambda t: t.update(a=torch.randn(300, 4)),
    "the same bytes in another shape": lambda t: t.update(a=t["a"].reshape(4, 3).contiguous()),
    "another dtype": lambda t: t.update(b=t["b"].double()),
    "another dtype of that width": lambda t: t.update(b=torch.arange(5, dtype=torch.int32)),
    "another order": lambda t: t.update(a=t.pop("a")),
    "two that change places": lambda t: t.update(a=t["b"], b=t["a"]),
    "a scalar that became a vector": lambda t: t.update(c=torch.tensor([7])),
    "nothing left": lambda t: t.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_shape_is_planned_anew_and_saved_right(saves, change):
    box = start()
    before = dict(box.tensors)
    assert save_box(saves, box)
    CHANGES[change](box.tensors)
    assert save_box(saves, box)
    assert not save_box(saves, box)
    box.tensors = before
    assert save_box(saves, box), "only the last plan is kept"
    assert not save_box(saves, box)


@pytest.mark.parametrize("change", [
    lambda t: t.update(a=t["a"].t().contiguous().t()),
    lambda t: t.update(a=torch.randn(30, 40)[::10, ::10]),
    lambda t: t.update(b=torch.ones(1).expand(5)),
])  # fmt: skip
def test_how_a_tensor_lies_in_memory_is_no_matter(saves, change):
    box = start()
    assert save_box(saves, box)
    change(box.tensors)
    assert not save_box(saves, box)


def test_an_optimizer_that_makes_its_state_at_the_first_step(saves):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())

    def save_all():
        def check(load):
            other = copy.deepcopy(model)
            for parameter in other.parameters():
                nn.init.zeros_(parameter)
            fresh = torch.optim.AdamW(other.parameters())
            assert load(TrainingState(models={"m": other}, optimizers={"o": fresh}))
            mine, theirs = optimizer.state_dict()["state"], fresh.state_dict()["state"]
            assert mine.keys() == theirs.keys()
            return all(bitwise(theirs[n][k], v) for n in mine for k, v in mine[n].items()) and all(
                bitwise(other.state_dict()[key], value) for key, value in model.state_dict().items()
            )

        return saves.planned(TrainingState(models={"m": model}, optimizers={"o": optimizer}), check)

    def step():
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()

    assert save_all() and not save_all()
    step()
    assert save_all()
    step()
    assert not save_all()


def test_a_save_that_came_to_nothing_spoils_no_later_one(saves, monkeypatch):
    box = start()
    assert save_box(saves, box)
    box.tensors["d"] = torch.randn(3000)
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", lambda *_: 1 / 0)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            save_box(saves, box)
    assert not save_box(saves, box), "the plan was made before the disk failed"
    box.tensors["e"] = print
    with pytest.raises(Exception, match="objects/box/e"):
        save_box(saves, box)
    del box.tensors["e"]
    assert not save_box(saves, box)


def test_the_memory_of_the_plan_before_is_given_back_before_more_is_taken(saves, monkeypatch):
    """Two copies of a large state at once may be more than a node has."""
    import mmap
    import weakref

    alive, most = weakref.WeakSet(), []

    class Watched(mmap.mmap):
        __hash__ = object.__hash__

        def __init__(self, *_, **__):
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr("slurm_forge.checkpoint.write.arena.mmap.mmap", Watched)
    for size in (1000, 100_000, 1_000_000):
        name = CheckpointName.new(step=size, attempt=1, launch=1)
        state = TrainingState(objects={"box": Box({"a": torch.ones(size)})})
        saves.writer.begin(state, name=name, reason="test", fence=no_fence).result()
    assert most == [1, 1, 1]


def test_shards_lie_apart_and_where_any_dtype_can_be_viewed():
    shards = [Shard("k", "uint8", 1, (n,), (0,), (n,)) for n in (0, 1, 63, 64, 65, 0, 1000)]
    places, size = lay_out(shards)
    assert all(place % ALIGN == 0 for place in places)
    ends = [place + shard.nbytes for place, shard in zip(places, shards, strict=True)]
    assert all(end <= place for end, place in zip(ends, places[1:], strict=False))
    assert size == ends[-1]
    assert lay_out([]) == ([], 0)
