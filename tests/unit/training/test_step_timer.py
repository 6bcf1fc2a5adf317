"""How a rank measures its own part of a step, and what it says of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.protocol import decode, encode
from slurm_forge.control.messages.step_timing import StepTiming
from slurm_forge.spec.faults import parse_faults
from slurm_forge.training.faults.injector import FaultInjector
from slurm_forge.training.monitor.node_benchmark import HostBenchmark
from slurm_forge.training.monitor.step_timer import HostStopwatch, StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(watch: HostStopwatch, clock: Clock, own: float, rest: float) -> None:
    watch.begin()
    clock.now += own
    watch.hand_over()
    clock.now += rest / 2
    watch.hand_over()  # a second backward: who waited in the first one does no own work there
    clock.now += rest / 2
    watch.end()


def test_the_own_part_ends_where_others_are_waited_for() -> None:
    clock = Clock()
    watch = HostStopwatch(clock=clock)
    for own in (0.1, 0.2, 0.3, 0.2, 9.0):
        step(watch, clock, own, 0.5)
    medians = watch.take()
    assert (medians.count, medians.own) == (5, pytest.approx(0.2))
    assert medians.spread == pytest.approx(0.05)
    assert watch.take().count == 0


def test_a_loop_that_hands_over_nowhere_is_measured_by_processor_time() -> None:
    clock, worked = Clock(), Clock()
    watch = HostStopwatch(clock=clock, processor=worked)
    for _ in range(4):
        watch.begin()
        clock.now += 1.0  # of which most is waiting
        worked.now += 0.2
        watch.end()
    medians = watch.take()
    assert (medians.count, medians.own) == (3, pytest.approx(0.2))


def fault_injector(tmp_path: Path, *faults: str, sleep: Callable[[float], None]) -> FaultInjector:
    found = [fault for text in faults for fault in parse_faults(text)]
    return FaultInjector(
        found, rank=1, world_size=4, attempt=1, launch=1, directory=tmp_path,
        say=lambda _: None, sleep=sleep,
    )  # fmt: skip


def test_a_message_every_some_seconds_and_no_more(tmp_path: Path) -> None:
    clock, said = Clock(), list[Message]()
    timer = StepTimer(
        said.append,
        device=torch.device("cpu"),
        every=timedelta(seconds=15),
        fault_injector=fault_injector(tmp_path, sleep=lambda _: None),
        models=lambda: (),
        clock=clock,
    )
    for number in range(100):
        timer.begin()
        if number == 10:
            timer.try_out()
        timer.handing_over()
        clock.now += 1.0
        timer.end(number + 1)
    paced = [each for each in said if isinstance(each, StepTiming)]
    assert [each.step for each in paced] == [15, 30, 45, 60, 75, 90]
    assert [each.count for each in paced] == [15] * 6
    assert paced[0].trial_s > (0.0,)
    assert {each.trial_s for each in paced[1:]} == {(0.0,)}
    assert decode(encode(paced[0])) == paced[0]


@pytest.mark.parametrize(("word", "trial"), [("", False), (":node", True)])
def test_a_fault_makes_a_rank_slow_or_its_node(tmp_path: Path, word: str, trial: bool) -> None:
    slept: list[float] = []
    faults = fault_injector(tmp_path, f"slow@5x10:rank1:factor=3{word}", sleep=slept.append)
    timer = StepTimer(
        lambda _: None,
        device=torch.device("cpu"),
        every=timedelta(seconds=15),
        fault_injector=faults,
        models=lambda: (),
    )
    for number in range(20):
        timer.begin()
        faults.boundary(number)
        time.sleep(0.001)
        timer.handing_over()
        timer.end(number + 1)
    assert len(slept) == 10  # in each of its steps, in whatever launch: nothing stays of it
    assert all(each >= 0.002 for each in slept)
    slept.clear()
    faults.boundary(7)
    timer.try_out()
    assert bool(slept) is trial


def test_the_trial_is_told_once_and_leaves_no_trace() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trial = HostBenchmark()
    trial.run(lambda _: None)
    assert 1e-6 < trial.take() < 0.1
    assert trial.take() == 0.0
    assert torch.equal(torch.get_rng_state(), before)
