"""Who is told to be slow: nobody in noise, nobody for what the program does, a slow node soon."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.monitor.straggler_reports import (
    StepTimes,
    Straggler,
    StragglerCause,
    StragglerEnd,
    in_words,
)
from slurm_forge.recovery.monitor.stragglers import StragglerDetector

#: A trial comes with every fourth window, as at shipped settings.
TRIALS = 4
STEPS = 30


@dataclass
class Job:
    """A simulated run: every step of every rank is drawn, as heavy-tailed as steps are."""

    seed: int
    ranks: int = 8
    per_host: int = 2
    factor: float = 1.25
    work: Sequence[float] = ()
    slow: frozenset[int] = frozenset()
    by: float = 1.3
    begins: int = 12
    ends: int = 10_000
    trial_too: bool = True
    told: bool = True
    scatter: float = 0.15
    steps: int = STEPS

    def run(self, windows: int = 40) -> list[tuple[int, Straggler | StragglerEnd]]:
        """What is said, and in which window."""
        rng = random.Random(self.seed)
        straggling = StragglerDetector(self.factor)
        found: list[tuple[int, Straggler | StragglerEnd]] = []
        for window in range(windows):
            readings = tuple(self._reading(rng, rank, window) for rank in range(self.ranks))
            found += [(window, each) for each in straggling.window(readings)]
        return found

    def _reading(self, rng: random.Random, rank: int, window: int) -> StepTimes:
        ill = rank in self.slow and self.begins <= window < self.ends
        factor = self.by if ill else 1.0
        usual = 0.1 * (self.work[rank] if self.work else 1.0)
        drawn = sorted(factor * self._step(rng, usual) for _ in range(self.steps))
        trial = 0.0
        if window % TRIALS == 0:
            trial = 2e-4 * (1 + abs(rng.gauss(0, 0.04))) * (factor if self.trial_too else 1.0)
        return StepTimes(
            rank=rank,
            host=f"n{rank // self.per_host:02d}",
            step=(window + 1) * self.steps,
            count=self.steps,
            own_s=drawn[len(drawn) // 2] if self.told else 0.0,
            spread_s=(drawn[3 * len(drawn) // 4] - drawn[len(drawn) // 4]) / 2,
            trial_s=trial,
        )

    def _step(self, rng: random.Random, usual: float) -> float:
        took = usual * math.exp(rng.gauss(0, self.scatter))  # lognormvariate draws slowly
        if rng.random() < 0.03:  # garbage is collected, a file comes late
            took += rng.paretovariate(1.5) * usual
        return took


def named(job: Job, windows: int = 40) -> list[tuple[int, Straggler]]:
    return [(at, each) for at, each in job.run(windows) if isinstance(each, Straggler)]


def uneven(seed: int, ranks: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.uniform(0.5, 2.0) for _ in range(ranks)]


NOISE: dict[str, Callable[[int], Job]] = {
    "even": Job,
    "rank 0 has more to do": lambda seed: Job(seed, work=(1.5, *[1.0] * 7)),
    "unequal work": lambda seed: Job(seed, work=uneven(seed, 8)),
    "two stages of a pipeline": lambda seed: Job(seed, work=(1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2)),
    "two ranks": lambda seed: Job(seed, ranks=2, per_host=1),
    "one host": lambda seed: Job(seed, ranks=4, per_host=4, work=(1.4, 1, 1, 1)),
    "samples of very different length": lambda seed: Job(seed, scatter=0.8),
    "few steps in a window": lambda seed: Job(seed, steps=2, scatter=0.3),
}


@pytest.mark.parametrize("kind", NOISE)
def test_nobody_is_named_in_noise_or_for_what_the_program_does(kind: str) -> None:
    wrong = [(seed, said) for seed in range(25) if (said := NOISE[kind](seed).run())]
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", NOISE)
def test_nobody_is_named_in_ten_thousand_noisy_runs(kind: str) -> None:
    wrong = [(seed, said) for seed in range(1000, 2250) if (said := NOISE[kind](seed).run())]
    assert not wrong


@given(
    seed=st.integers(0, 10**6),
    rank=st.integers(0, 7),
    per_host=st.sampled_from([1, 2, 4]),
    by=st.floats(1.35, 20.0),
)
def test_a_slow_node_is_named_within_three_trials(
    seed: int, rank: int, per_host: int, by: float
) -> None:
    job = Job(seed, slow=frozenset({rank}), per_host=per_host, by=by)
    ((at, slow),) = named(job)
    assert (slow.host, slow.ranks) == (f"n{rank // per_host:02d}", (rank,))
    assert slow.why is StragglerCause.NODE
    assert at - job.begins <= 3 * TRIALS + 1
    assert slow.factor == pytest.approx(by, rel=0.15)
    assert slow.trial == pytest.approx(by, rel=0.15)
    assert slow.lost_s == pytest.approx(0.1 * (by - 1), rel=0.6)
    assert slow.since_step == pytest.approx(job.begins * STEPS, abs=2 * STEPS)


@pytest.mark.parametrize("seed", range(20))
def test_thirty_per_cent_are_enough(seed: int) -> None:
    job = Job(seed, slow=frozenset({5}), by=1.3)
    ((at, slow),) = named(job)
    assert (slow.host, slow.ranks, slow.why) == ("n02", (5,), StragglerCause.NODE)
    assert at - job.begins <= 5 * TRIALS


def test_two_ranks_of_a_host_are_one_straggler() -> None:
    ((_, slow),) = named(Job(3, slow=frozenset({4, 5}), by=1.8))
    assert (slow.host, slow.ranks) == ("n02", (4, 5))


def test_windows_of_two_ranks_need_not_begin_together() -> None:
    straggling = StragglerDetector(1.25)
    found: list[Straggler | StragglerEnd] = []
    for window in range(30):
        readings = []
        for rank in range(4):
            # Rank 3 has said what it was before a moment later than rank 2.
            slow = (rank == 2 and window >= 10) or (rank == 3 and window >= 11)
            factor = 3.0 if slow else 1.0
            readings.append(
                StepTimes(
                    rank=rank,
                    host=f"n{min(rank, 2)}",
                    step=(window + 1) * 20,
                    count=20,
                    own_s=0.01 * factor,
                    spread_s=0.0001,
                    trial_s=2e-4 * factor,
                )
            )
        found += straggling.window(readings)
    (named_,) = found
    assert isinstance(named_, Straggler)
    assert (named_.host, named_.ranks) == ("n2", (2, 3))


def test_of_two_ranks_the_slower_one() -> None:
    ((_, slow),) = named(Job(3, ranks=2, per_host=1, slow=frozenset({0}), by=1.6))
    assert slow.host == "n00"


def test_a_node_that_is_slow_from_the_start() -> None:
    ((_, slow),) = named(Job(5, slow=frozenset({6, 7}), by=1.6, begins=0))
    assert (slow.host, slow.why) == ("n03", StragglerCause.NODE)


def test_who_has_had_more_to_do_for_long_is_not_blamed_for_three_slow_trials() -> None:
    """A stage of a pipeline is tried every minute for weeks: some of the trials come late."""
    straggling = StragglerDetector(1.25)
    said: list[tuple[int, Straggler | StragglerEnd]] = []
    for window in range(-600, 120):
        late = 60 <= window < 72 or window >= 80
        found = straggling.window(
            [
                StepTimes(
                    rank=rank,
                    host=f"n{rank}",
                    step=30 * (window + 601),
                    count=30,
                    own_s=0.13 if rank == 2 else 0.1,
                    trial_s=(0.0 if window % TRIALS else 2.4e-4 if late and rank == 2 else 2e-4),
                )
                for rank in range(4)
            ]
        )
        said += [(window, each) for each in found]
        assert all(len(row.factors) <= 240 for row in straggling._rows.values())
    ((at, slow),) = said
    assert isinstance(slow, Straggler)
    assert (at, slow.host, slow.why) == (100, "n2", StragglerCause.NODE)


def test_who_gets_more_to_do_than_before_is_told_and_the_node_is_not_blamed() -> None:
    ((_, slow),) = named(Job(5, slow=frozenset({2}), by=2.0, trial_too=False))
    assert (slow.host, slow.why, slow.why.of_node) == ("n01", StragglerCause.WORK, False)
    assert "its compute time grew" in in_words(slow)


def test_what_looked_like_work_may_turn_out_to_be_the_node() -> None:
    straggling = StragglerDetector(1.25)
    found: list[Straggler | StragglerEnd] = []
    for window in range(60):
        readings = [
            StepTimes(
                rank=rank,
                host=f"n{rank}",
                step=(window + 1) * 20,
                count=20,
                own_s=0.1 * (2.0 if rank == 2 and window >= 12 else 1.0),
                spread_s=0.001,
                trial_s=2e-4 * (2.0 if rank == 2 and window >= 30 else 1.0),
            )
            for rank in range(4)
        ]
        found += straggling.window(readings)
    assert [each.why for each in found if isinstance(each, Straggler)] == [
        StragglerCause.WORK,
        StragglerCause.NODE,
    ]
    assert [each.why for each in straggling.named] == [StragglerCause.NODE]


def test_a_trial_that_says_nothing_clear_is_no_word_for_the_node() -> None:
    straggling = StragglerDetector(1.25)
    rng = random.Random(4)
    found: list[Straggler | StragglerEnd] = []
    for window in range(60):
        readings = [
            StepTimes(
                rank=rank,
                host=f"n{rank}",
                step=(window + 1) * 20,
                count=20,
                own_s=0.1 * (3.0 if rank == 2 and window >= 12 else 1.0),
                spread_s=0.001,
                # A machine so busy that the same work takes anything; slower here, all in all.
                trial_s=2e-4 * rng.uniform(1, 4) * (3.0 if rank == 2 and window >= 12 else 1.0),
            )
            for rank in range(4)
        ]
        found += straggling.window(readings)
    assert all(each.why is StragglerCause.NODE for each in found if isinstance(each, Straggler))


def test_a_hiccup_is_nobody_s_name() -> None:
    job = Job(5, slow=frozenset({2, 3}), by=3.0, begins=12, ends=14)
    assert not job.run()


def test_where_all_differ_a_difference_says_little() -> None:
    work = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.0, 1.3)
    assert not named(Job(5, work=work, slow=frozenset({7}), by=1.3))


def test_where_steps_tell_nothing_the_trial_does() -> None:
    ((_, slow),) = named(Job(5, slow=frozenset({3}), by=1.6, told=False))
    assert (slow.host, slow.ranks, slow.why, slow.factor) == ("n01", (3,), StragglerCause.NODE, 0.0)
    assert not named(Job(6, told=False))


def test_never_more_than_a_minority() -> None:
    assert not named(Job(5, slow=frozenset(range(4)), by=2.0))  # half of the hosts
    assert not named(Job(5, slow=frozenset(range(2, 8)), by=2.0))


def test_it_is_over_when_it_is_as_fast_as_the_others_again() -> None:
    job = Job(7, slow=frozenset({3}), by=2.0, begins=12, ends=40)
    (_, slow), (at, over) = job.run(60)
    assert isinstance(slow, Straggler)
    assert isinstance(over, StragglerEnd)
    assert 42 <= at <= 46  # not by one good window
    # 28 windows of it, from the first one on.
    assert over.steps == pytest.approx(28 * STEPS, rel=0.1)
    assert over.lost_s == pytest.approx(28 * STEPS * 0.1, rel=0.2)


def test_a_thousand_ranks_take_milliseconds() -> None:
    readings = [
        StepTimes(rank=rank, host=f"n{rank // 8}", step=1, count=50, own_s=0.1 + 1e-6 * rank)
        for rank in range(1000)
    ]
    straggling = StragglerDetector(1.25)
    for _ in range(4):
        straggling.window(readings)
    began = time.process_time()
    straggling.window(readings)
    assert time.process_time() - began < 1.0


@given(
    st.lists(
        st.lists(
            st.builds(
                StepTimes,
                rank=st.integers(0, 5),
                host=st.sampled_from(["a", "b", "c"]),
                step=st.integers(0, 10**9),
                count=st.integers(0, 1000),
                own_s=st.floats(0, 1e6),
                spread_s=st.floats(0, 1e6),
                trial_s=st.floats(0, 10),
            ),
            max_size=6,
            unique_by=lambda each: each.rank,
        ),
        max_size=12,
    )
)
def test_whatever_ranks_say_it_is_taken(windows: list[list[StepTimes]]) -> None:
    straggling = StragglerDetector(1.25)
    for each in windows:
        for found in straggling.window(each):
            if isinstance(found, Straggler):
                assert found.ranks
                assert in_words(found)


def test_in_words() -> None:
    slow = Straggler(
        host="n06",
        ranks=(3,),
        factor=1.6,
        trial=1.58,
        why=StragglerCause.NODE,
        since_step=9800,
        lost_s=0.0412,
    )
    assert in_words(slow) == (
        "n06 (rank 3) 1.60x slower than the others since step 9800: the node itself (the same "
        "work takes 1.58x as long there); each step 41.2 ms longer"
    )
    earlier = replace(slow, why=StragglerCause.STARVED)  # of a journal of an earlier version
    assert "busy with something else" in in_words(earlier)
