"""Faults on purpose inside a run: what they do, once per run or always, on which rank."""

from __future__ import annotations

import json
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from slurm_forge.errors import UnsupportedError
from slurm_forge.spec.faults import parse_faults
from slurm_forge.training.core.loss import Loss
from slurm_forge.training.core.run_state import Registry
from slurm_forge.training.core.sample_order import Windows
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.faults import injector as injecting
from slurm_forge.training.faults.injector import (
    FOLDER,
    FaultInjector,
    first_sample,
)
from slurm_forge.vocabulary.plan import SampleWindow


class Rank:
    """One rank of a run, with what its faults said and did."""

    def __init__(self, folder: Path, text: str, *, rank: int = 0, launch: int = 1) -> None:
        self.said: list[str] = []
        self.signals: list[Signals] = []
        self.slept: list[float] = []
        self.faults = FaultInjector(
            parse_faults(text),
            rank=rank,
            world_size=2,
            attempt=1,
            launch=launch,
            directory=folder,
            say=self.said.append,
            send=self.signals.append,
            sleep=self.slept.append,
        )

    def step(
        self, step: int, registry: Registry | None = None, micro_batches: int = 1
    ) -> list[float]:
        """The losses of one step, each of 4 samples, all of them 1 before a fault."""
        self.faults.boundary(step, registry)
        return [
            float(
                self.faults.loss(
                    torch.ones(()),
                    step=step,
                    samples_first=8 * step + 4 * index,
                    samples=4,
                    micro_batch=index,
                )
            )
            for index in range(micro_batches)
        ]


def struck(losses: list[float]) -> bool:
    return losses != [1.0] * len(losses)


def trained() -> tuple[Registry, nn.Module, torch.optim.Optimizer]:
    """A model with buffers, and an optimizer with moments."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", optimizer)
    return registry, model, optimizer


def moments(optimizer: torch.optim.Optimizer, key: str) -> list[torch.Tensor]:
    return [state[key] for state in optimizer.state.values()]


# -- once -----------------------------------------------------------------------------------------


def test_a_fault_strikes_every_micro_batch_of_its_step_and_never_again(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "spike@3:factor=10")
    assert [rank.step(step, micro_batches=2) for step in (2, 3, 4)] == [[1, 1], [10, 10], [1, 1]]
    assert not struck(rank.step(3)), "again after a rollback in this process"
    assert not struck(Rank(tmp_path, "spike@3:factor=10", launch=2).step(3)), "after a relaunch"
    (file,) = (tmp_path / FOLDER).iterdir()
    assert json.loads(file.read_text())["fault"] == "spike@3:factor=10"


def test_a_fault_of_a_node_strikes_no_step(tmp_path: Path) -> None:
    faults = FaultInjector(
        parse_faults("bad_node:rank0,bad_link:host=n1"),
        rank=0,
        world_size=1,
        attempt=1,
        launch=1,
        directory=tmp_path,
    )
    assert not faults.active
    faults.boundary(0)


def test_each_of_several_steps_is_struck_once(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "nan@3x3")
    assert [struck(rank.step(step)) for step in (2, 3, 4)] == [False, True, True]
    later = Rank(tmp_path, "nan@3x3", launch=2)
    assert [struck(later.step(step)) for step in (3, 4, 5, 6)] == [False, False, True, False]


def test_ranks_of_a_launch_are_struck_together_and_those_of_the_next_are_not(
    tmp_path: Path,
) -> None:
    together = [Rank(tmp_path, "nan@3", rank=rank) for rank in (0, 1)]
    assert [struck(rank.step(3)) for rank in together] == [True, True]
    # Only rank 0 got as far as its fault before the launch was over.
    assert struck(Rank(tmp_path, "inf@5", rank=0).step(5))
    assert not struck(Rank(tmp_path, "inf@5", rank=1, launch=2).step(5))


def test_a_fault_of_one_rank_is_no_other_rank_s(tmp_path: Path) -> None:
    other, mine = (Rank(tmp_path, "nan@3:rank1", rank=rank) for rank in (0, 1))
    assert not other.faults.active
    assert [struck(rank.step(3)) for rank in (other, mine)] == [False, True]


def test_always_is_whenever_the_step_comes(tmp_path: Path) -> None:
    for launch in (1, 2):
        rank = Rank(tmp_path, "nan@3:always", launch=launch)
        assert [struck(rank.step(3)) for _ in range(2)] == [True, True]
    assert not (tmp_path / FOLDER).exists()


def test_a_replay_is_struck_by_deterministic_faults_only(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "nan@3,inf@4:always")
    assert struck(rank.step(3))
    with rank.faults.replay():
        assert not struck(rank.step(3)), "as if the hardware had done it"
        assert struck(rank.step(4)), "as if the data had done it"
    fresh = Rank(tmp_path / "other", "nan@3")
    with fresh.faults.replay():
        assert not struck(fresh.step(3))
    assert struck(fresh.step(3)), "used up by a replay"


def test_a_fault_that_cannot_be_remembered_does_not_strike(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(mode=0o700)
    (tmp_path / FOLDER / "nan@3.json").mkdir()
    rank = Rank(tmp_path, "nan@3")
    assert not struck(rank.step(3))


def test_a_fault_is_on_disk_before_it_strikes(tmp_path: Path) -> None:
    """The process really is killed, and comes again."""

    def rank_0(launch: int) -> None:
        faults = FaultInjector(
            parse_faults("kill@3:rank0"), rank=0, world_size=1, attempt=1, launch=launch,
            directory=tmp_path,
        )  # fmt: skip
        for step in range(5):
            faults.boundary(step)
        (tmp_path / f"through {launch}").touch()

    ends = []
    for launch in (1, 2):
        process = multiprocessing.get_context("fork").Process(target=rank_0, args=(launch,))
        process.start()
        process.join(60)
        ends.append((process.exitcode, (tmp_path / f"through {launch}").exists()))
    assert ends == [(-signal.SIGKILL, False), (0, True)]


# -- poisoned samples -----------------------------------------------------------------------------


def loss_of(rank: Rank, first: int, samples: int, skipped: tuple[SampleWindow, ...] = ()) -> float:
    return float(
        rank.faults.loss(
            torch.ones(()), step=0, samples_first=first, samples=samples, micro_batch=0,
            skipped=skipped,
        )
    )  # fmt: skip


def test_poison_strikes_whatever_step_its_samples_are_in(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "spike:samples=40-41:factor=3")
    for _ in range(2):
        struck = {first for first in range(30, 50) if loss_of(rank, first, 4) == 3}
        assert struck == {37, 38, 39, 40, 41}


@given(
    st.integers(0, 40),
    st.integers(1, 12),
    st.integers(0, 40),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=3),
)
@example(kept=4, samples=4, poison=6, count=3, windows=[(5, 20)])  # the poison is left out
def test_poison_strikes_exactly_the_batches_that_hold_one_of_its_samples(
    kept: int, samples: int, poison: int, count: int, windows: list[tuple[int, int]]
) -> None:
    skipped = tuple(SampleWindow(*window) for window in windows)
    without = Windows(skipped)
    positions = [without.at(kept + index) for index in range(samples)]
    window = SampleWindow(poison, poison + count)
    held = any(window.first <= position < window.stop for position in positions)
    assert injecting._holds(window, positions[0], samples, skipped) == held


def test_the_place_of_a_micro_batch_in_the_stream() -> None:
    skipped = (SampleWindow(100, 110),)
    batch = Batch(step=0, first=96, consumed=118, micro_batches=((),) * 2, micro_sizes=(4, 2),
                  sample_ids=((0, 0),) * 6)  # fmt: skip
    without = Windows(skipped)
    stream = [without.at(without.kept_before(96) + index) for index in range(12)]
    found = [
        first_sample(batch, micro, rank=rank, skipped=skipped)
        for rank in (0, 1)
        for micro in (0, 1)
    ]
    assert found == [stream[0], stream[4], stream[6], stream[10]]


# -- what they do ---------------------------------------------------------------------------------


def test_signals_go_to_the_rank_itself_at_the_boundary(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "term@1,usr1@2,stop@3,kill@4:rank1")
    for step in range(6):
        rank.faults.boundary(step)
    assert rank.signals == [Signals.SIGTERM, Signals.SIGUSR1, Signals.SIGSTOP]


def test_a_wrong_value_is_in_the_next_probe_of_this_rank_and_in_no_other(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "wrong@1,wrong@3:rank1")
    rank.step(0)
    assert not rank.faults.probe_spoilt()
    rank.step(1)
    rank.step(2)
    assert rank.faults.probe_spoilt()
    rank.step(3)
    assert not rank.faults.probe_spoilt()


def test_a_rank_that_hangs_sleeps_for_ever_and_a_slow_one_for_a_while(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "slow@1:seconds=7,hang@2:seconds=9,hang@3")
    rank.step(1)
    rank.step(2)
    assert rank.slept == [7, 9]

    def third(seconds: float) -> None:
        rank.slept.append(seconds)
        if len(rank.slept) == 5:
            raise KeyboardInterrupt

    rank.faults._sleep = third
    with pytest.raises(KeyboardInterrupt):
        rank.step(3)


def test_what_a_slow_fault_may_say(tmp_path: Path) -> None:
    (node, work) = parse_faults("slow@5x400:rank1:factor=2:node,slow@9:factor=1.5")
    assert (node.drags, str(node)) == (True, "slow@5x400:rank1:node:factor=2")
    assert parse_faults(str(node)) == (node,)
    assert work.target is None
    for wrong, why in (
        ("slow@5:node", "node goes with slow and a factor, such as slow@5x400:rank1:factor=2:node"),
        ("hang@5:node", "node goes with slow and a factor"),
        ("corrupt@5:node:nan", "node goes with slow and a factor"),
        ("slow@5:factor=0.5", "1 or more"),
        ("slow@5:factor=2:seconds=3", "no seconds"),
        ("slow:samples=3-7:factor=2", "and a step"),
    ):
        with pytest.raises(ValueError, match=why):
            parse_faults(wrong)


def test_data_and_collective_say_what_they_need(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="num_workers=1"):
        Rank(tmp_path, "data@1").step(1)
    with pytest.raises(UnsupportedError, match="more ranks"):
        Rank(tmp_path, "collective@2").step(2)


def test_the_interpreters_lock_is_held_for_as_long_as_was_said(tmp_path: Path) -> None:
    stop, ran = threading.Event(), []

    def others() -> None:
        while not stop.wait(0.01):
            ran.append(time.monotonic())

    beside = threading.Thread(target=others)
    beside.start()
    begun = time.monotonic()
    Rank(tmp_path, "gil@1:seconds=0.4").step(1)
    ended = time.monotonic()
    stop.set()
    beside.join()
    assert not [at for at in ran if begun + 0.1 < at < begun + 0.35]
    assert ended - begun >= 0.4


def test_an_exception_is_one_that_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="an injected fault at step 6"):
        Rank(tmp_path, "exception@6").step(6)


@pytest.mark.parametrize(("text", "factor"), [
    ("nan@0", float("nan")), ("inf@0", float("inf")), ("spike@0", 1e4),
    ("corrupt@0:loss:-inf", float("-inf")), ("corrupt@0:loss:1e30", 1e30),
])  # fmt: skip
def test_a_loss_is_spoilt_with_its_gradient_in_either_form(
    tmp_path: Path, text: str, factor: float
) -> None:
    def of(make: Callable[[torch.Tensor], Any], folder: str) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.tensor(2.0, requires_grad=True)
        faults = Rank(tmp_path / folder, text).faults
        found = faults.loss(make(weight), step=0, samples_first=0, samples=4, micro_batch=0)
        value = found.sum if isinstance(found, Loss) else found
        value.backward()
        assert weight.grad is not None
        return value.detach(), weight.grad

    for folder, make in (("a", lambda w: w * 3), ("b", lambda w: Loss(w * 3, 5))):
        value, gradient = of(make, folder)
        torch.testing.assert_close(value, torch.tensor(6 * factor), equal_nan=True)
        torch.testing.assert_close(gradient, torch.tensor(3 * factor), equal_nan=True)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e30"])
@pytest.mark.parametrize("target", ["weight", "adam_m", "adam_v", "buffer"])
def test_state_is_damaged_in_one_element_before_the_step(
    tmp_path: Path, target: str, value: str
) -> None:
    registry, model, optimizer = trained()
    places = {
        "weight": list(model.parameters()),
        "adam_m": moments(optimizer, "exp_avg"),
        "adam_v": moments(optimizer, "exp_avg_sq"),
        "buffer": [b for b in model.buffers() if b.is_floating_point()],
    }
    before = {key: [t.detach().clone() for t in some] for key, some in places.items()}
    Rank(tmp_path, f"corrupt@5:{target}:{value}").step(5, registry)
    for key, some in places.items():
        pairs = zip(some, before[key], strict=True)
        changed = [
            now.item()
            for new, old in pairs
            for now, was in zip(new.flatten(), old.flatten(), strict=True)
            if not torch.equal(now, was)
        ]
        if key != target:
            assert changed == []
        else:
            torch.testing.assert_close(changed, [float(value)], equal_nan=True)


def test_a_state_that_is_not_there_is_an_error_and_not_a_rehearsal_of_nothing(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2)
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", torch.optim.AdamW(model.parameters()))
    for target in ("adam_m", "buffer"):
        with pytest.raises(UnsupportedError, match=f"change {target}"):
            Rank(tmp_path, f"corrupt@0:{target}:nan").step(0, registry)


def test_one_element_of_one_gradient_is_damaged_and_the_loss_is_not(tmp_path: Path) -> None:
    registry, model, _ = trained()
    rank = Rank(tmp_path, "corrupt@5:grad:1e30")
    batch = torch.randn(5, 3)
    for step in (5, 6):
        model.zero_grad()
        rank.faults.boundary(step, registry)
        loss = model(batch).square().sum()
        seen = rank.faults.loss(loss, step=step, samples_first=0, samples=5, micro_batch=0)
        assert torch.equal(seen, loss)
        seen.backward()
        damaged = sum(int((p.grad == 1e30).sum()) for p in model.parameters())
        assert damaged == (1 if step == 5 else 0)


def test_memory_runs_out_in_the_middle_of_a_backward(tmp_path: Path) -> None:
    registry, model, _ = trained()
    model.zero_grad()
    rank = Rank(tmp_path, "oom@5:above=4")
    rank.faults.boundary(5, registry)

    def loss(samples: int) -> torch.Tensor:
        value = model(torch.randn(5, 3)).square().sum()
        return rank.faults.loss(value, step=5, samples_first=0, samples=samples, micro_batch=0)

    loss(4).backward()
    model.zero_grad()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        loss(5).backward()
    arrived = [p.grad is not None for p in model.parameters()]
    assert any(arrived), "before the first gradient"
    assert not all(arrived), "after the last gradient"
    rank.faults.boundary(6, registry)
    loss(4).backward()


def test_a_hook_that_never_fired_is_gone_with_its_step(tmp_path: Path) -> None:
    registry, model, _ = trained()
    rank = Rank(tmp_path, "corrupt@5:grad:nan")
    rank.step(5, registry)  # its loss has nothing to do with the model
    rank.faults.boundary(6, registry)
    model.zero_grad()
    model(torch.randn(5, 3)).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


# -- without faults -------------------------------------------------------------------------------


def test_without_faults_nothing_is_done_at_all(tmp_path: Path) -> None:
    faults = FaultInjector((), rank=0, world_size=1, attempt=1, launch=1, directory=tmp_path)
    loss = torch.ones(())
    assert not faults.active
    faults.boundary(3, None)
    assert faults.loss(loss, step=3, samples_first=0, samples=4, micro_batch=0) is loss
    assert list(tmp_path.iterdir()) == []


def test_what_can_never_strike_is_said(tmp_path: Path) -> None:
    assert "nan@3:rank7 can't strike: there are 2 ranks" in Rank(tmp_path, "nan@3:rank7").said[0]
    assert Rank(tmp_path, "nan@3:rank7", rank=1).said == []
