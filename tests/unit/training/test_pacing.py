"""How a rank measures its own part of a step, and what it says of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.protocol import (
    decode,
    encode,
)
from slurm_forge.control.messages.step_timing import Paced
from slurm_forge.spec.faults import parse_faults
from slurm_forge.training.faults.injector import Injecting
from slurm_forge.training.monitor.node_benchmark import HostTrial
from slurm_forge.training.monitor.pace import (
    Pacing,
    Starving,
    cpu_groups,
)
from slurm_forge.training.monitor.stopwatch import HostWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(watch: HostWatch, clock: Clock, own: float, rest: float) -> None:
    watch.begin()
    clock.now += own
    watch.hand_over()
    clock.now += rest / 2
    watch.hand_over()  # a second backward: who waited in the first one does no own work there
    clock.now += rest / 2
    watch.end()


def test_own_part_and_rest_are_told_apart() -> None:
    clock = Clock()
    watch = HostWatch(clock=clock)
    for own in (0.1, 0.2, 0.3, 0.2, 9.0):
        step(watch, clock, own, 0.5)
    laps = watch.take()
    assert (laps.count, laps.own, laps.rest) == (5, pytest.approx(0.2), pytest.approx(0.5))
    assert laps.spread == pytest.approx(0.05)
    assert watch.take().count == 0


def test_a_loop_that_hands_over_nowhere_is_measured_by_processor_time() -> None:
    clock, worked = Clock(), Clock()
    watch = HostWatch(clock=clock, processor=worked)
    for _ in range(4):
        watch.begin()
        clock.now += 1.0  # of which most is waiting
        worked.now += 0.2
        watch.end()
    laps = watch.take()
    assert (laps.count, laps.own, laps.rest) == (3, pytest.approx(0.2), pytest.approx(0.8))


def injecting(tmp_path: Path, *faults: str, sleep: Callable[[float], None]) -> Injecting:
    found = [fault for text in faults for fault in parse_faults(text)]
    return Injecting(
        found, rank=1, world_size=4, attempt=1, launch=1, directory=tmp_path,
        say=lambda _: None, sleep=sleep,
    )  # fmt: skip


def test_a_message_every_some_seconds_and_no_more(tmp_path: Path) -> None:
    clock, said = Clock(), list[Message]()
    pacing = Pacing(
        said.append,
        device=torch.device("cpu"),
        every=timedelta(seconds=15),
        injecting=injecting(tmp_path, sleep=lambda _: None),
        models=lambda: (),
        clock=clock,
    )
    for number in range(100):
        pacing.begin()
        if number == 10:
            pacing.try_out()
        pacing.handing_over()
        clock.now += 1.0
        pacing.end(number + 1)
    paced = [each for each in said if isinstance(each, Paced)]
    assert [each.step for each in paced] == [15, 30, 45, 60, 75, 90]
    assert [each.count for each in paced] == [15] * 6
    assert paced[0].trial_s > 0
    assert not any(each.trial_s for each in paced[1:])
    assert decode(encode(paced[0])) == paced[0]


@pytest.mark.parametrize(("word", "trial"), [("", False), (":node", True)])
def test_a_fault_makes_a_rank_slow_or_its_node(tmp_path: Path, word: str, trial: bool) -> None:
    slept: list[float] = []
    faults = injecting(tmp_path, f"slow@5x10:rank1:factor=3{word}", sleep=slept.append)
    pacing = Pacing(
        lambda _: None,
        device=torch.device("cpu"),
        every=timedelta(seconds=15),
        injecting=faults,
        models=lambda: (),
    )
    for number in range(20):
        pacing.begin()
        faults.boundary(number)
        time.sleep(0.001)
        pacing.handing_over()
        pacing.end(number + 1)
    assert len(slept) == 10  # in each of its steps, in whatever launch: nothing stays of it
    assert all(each >= 0.002 for each in slept)
    slept.clear()
    faults.boundary(7)
    pacing.try_out()
    assert bool(slept) is trial


def test_the_trial_is_told_once_and_leaves_no_trace() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trial = HostTrial()
    trial.run(lambda _: None)
    assert 1e-6 < trial.take() < 0.1
    assert trial.take() == 0.0
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_kernel_says_of_a_thread_that_waits_for_a_processor(tmp_path: Path) -> None:
    schedstat = tmp_path / "proc/thread-self/schedstat"
    schedstat.parent.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job_7\n")
    group = tmp_path / "sys/fs/cgroup/slurm/job_7"
    group.mkdir(parents=True)
    schedstat.write_text("1000000000 0 5\n")
    (group / "cpu.stat").write_text("usage_usec 5\nnr_periods 9\nnr_throttled 2\n")
    clock = Clock()
    starving = Starving(tmp_path, clock)
    assert starving.since_last() == (-1.0, -1)  # nothing to compare with yet
    schedstat.write_text("4000000000 1000000000 9\n")
    (group / "cpu.stat").write_text("usage_usec 5\nnr_periods 9\nnr_throttled 7\n")
    clock.now += 10.0
    assert starving.since_last() == (0.1, 5)
    assert Starving(tmp_path / "nowhere").since_last() == (-1.0, -1)


def test_where_a_group_s_counters_may_be() -> None:
    found = [str(each) for each in cpu_groups("4:cpu,cpuacct:/a\n0::/b\n")]
    assert found[0] == "sys/fs/cgroup/cpu,cpuacct/a"
    assert "sys/fs/cgroup/b" in found
    assert not any(".." in each for each in map(str, cpu_groups("0::/../../etc\n")))


def test_this_machine_says_something() -> None:
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("a kernel without scheduler statistics")
    starving = Starving()
    starving.since_last()
    sum(range(200_000))
    starved, _ = starving.since_last()
    assert 0 <= starved <= 1
