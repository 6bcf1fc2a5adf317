"""Whatever happens, however often: budgets hold, nothing suspect is used, and it ends in hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal.fold import fold
from slurm_forge.journal.known import newest_usable
from slurm_forge.journal.state import RunState, RunStatus
from slurm_forge.recovery import decide
from slurm_forge.recovery.policy.rungs import LR_FLOOR
from slurm_forge.recovery.policy.skip_windows import total
from slurm_forge.spec.recovery import Limits, Recovery, default_recovery
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan, SampleWindow
from slurm_forge.vocabulary.trust import Trust
from tests.unit.recovery.life import CAUSES, UNSTABLE, Life, incident, policies

FINAL = {Action.HOLD, Action.RAISE, Action.STOP}
IN_THE_JOB = {
    Action.RELAUNCH,
    Action.ROLLBACK,
    Action.SHRINK_MICRO_BATCH,
    Action.FEWER_WORKERS,
    Action.WARN,
}
BATCH = 32
LONG = pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=pytest.mark.slow)])


class Storm:
    """Incidents at random places, checked one by one; with progress in between or without."""

    def __init__(self, policy: Recovery, seed: int, *, twice: bool = False) -> None:
        self.life = Life(policy, twice=twice)
        self.random = random.Random(seed)
        self.reached = 0
        self.taken: Counter[tuple[Cause, int | None]] = Counter()
        #: How far training had got when each of them was taken last.
        self.marks: dict[tuple[Cause, int | None], int] = {}
        self.saved = False

    def strike(
        self, cause: Cause, *, ahead: bool = False, in_process: bool | None = None
    ) -> Decision:
        draw = self.random
        length = draw.randint(1, 6)
        onset = draw.randint(self.reached + 1 if ahead else 1, self.reached + 50)
        step = onset + length - 1
        first = (onset - 1) * BATCH
        window = SampleWindow(first, first + length * BATCH)
        seen_at = draw.choice([step, step, step, None])
        unstable = cause in UNSTABLE
        before = self.life.state
        decision = self.life.happens(
            cause,
            coupled=draw.random() < 0.1,
            mem=draw.choice([None, 0, 1 << 30]),
            time=draw.choice([None, timedelta(hours=8)]),
            nodes=draw.choice([None, 1, 16]),
            in_process=draw.random() < 0.3 if in_process is None else in_process,
            step=seen_at,
            onset=draw.choice([onset, None]) if unstable else None,
            window=draw.choice([window, window, None]) if unstable else None,
            repeats=draw.choice([True, False, None]) if unstable else None,
            hosts=draw.choice([(), (f"n{draw.randint(1, 5)}",)]),
            micro_batch=draw.choice([None, 1, 7, 64]),
        )
        self.reached = max(self.reached, seen_at or 0)
        self.taken[decision.cause, decision.rung] += 1
        self.marks[decision.cause, decision.rung] = self.reached
        self.check(before, decision)
        return decision

    def again(self) -> None:
        """Another attempt, some time later."""
        self.life.now += self.random.randint(1, 7200)
        self.life.attempt()

    def goes_on(self, causes: Sequence[Cause], *, ahead: bool = False) -> bool:
        """A launch ends with one of the causes; whether the run goes on, which it then does."""
        cause = self.random.choice(causes)
        begin = None if self.random.random() < 0.3 else self.reached
        if ahead:
            self.progress()
        self.life.launched(begin=begin, end=self.reached, why=cause.value)
        decision = self.strike(cause, ahead=ahead, in_process=False)
        if decision.action in FINAL:
            return False
        assert 0 <= decision.wait_s <= 3600
        self.life.now += decision.wait_s
        if decision.action in IN_THE_JOB:
            self.life.launch += 1
        else:
            self.again()
        return True

    def wander(self) -> None:
        """A checkpoint on ground that was known already: no progress, whatever is said of it."""
        known = min(self.marks.values(), default=self.reached)
        if known:
            name = self.life.commit(self.random.randint(1, known))
            self.saved = True
            if self.random.random() < 0.7:
                self.life.judge(name, self.random.choice(list(Trust)))

    def progress(self) -> None:
        self.reached += self.random.randint(1, 100)
        self.life.commit(self.reached, good=True)
        self.saved = True
        self.taken.clear()
        self.marks.clear()

    def check(self, before: RunState, decision: Decision) -> None:
        after, plan = self.life.state, decision.plan
        policy = self.life.policy
        if decision.rung is None:
            assert decision.action in (Action.HOLD, Action.STOP)
        else:
            rung = policy.ladder(decision.cause)[decision.rung]
            assert decision.action is rung.do
            assert rung.times is None or self.taken[decision.cause, decision.rung] <= rung.times
        assert decision.action not in (Action.SKIP, Action.HOOK)
        if decision.action in FINAL:
            assert decision.reason
            assert plan == before.plan
            assert after.status in (RunStatus.HELD, RunStatus.STOPPED, RunStatus.CANCELLED)
        if decision.action is Action.ROLLBACK:
            self.check_target(before, after, decision)
        assert after.plan == plan
        assert LR_FLOOR <= plan.lr_factor <= 1.0
        assert plan.micro_batch is None or plan.micro_batch >= 1
        check_windows(before.plan, plan)

    def check_target(self, before: RunState, after: RunState, decision: Decision) -> None:
        if decision.target is None:
            assert not self.saved, "a run that has saved is not started over"
            return
        name = CheckpointName.parse(decision.target)
        (found,) = [each for each in before.known if each.name == name]
        assert found.trust is not Trust.SUSPECT
        assert before.refusal(name) is None
        resumed = newest_usable(after.known)
        assert resumed is not None and resumed.name.step == name.step
        assert decision.plan.lr_from_step in (before.plan.lr_from_step, name.step)


def check_windows(before: RecoveryPlan, after: RecoveryPlan) -> None:
    windows = after.skipped
    assert all(each.first < each.stop for each in windows)
    assert all(a.stop < b.first for a, b in pairwise(windows))
    for old in before.skipped:
        assert any(new.first <= old.first and old.stop <= new.stop for new in windows)


def unlimited(policy: Recovery, cause: Cause) -> bool:
    return any(r.times is None and r.do not in FINAL for r in policy.ladder(cause))


SEEDS = st.integers(0, 2**32)


@given(policy=policies(), seed=SEEDS, strikes=st.integers(1, 60), twice=st.booleans())
def test_any_policy_in_any_storm(policy: Recovery, seed: int, strikes: int, twice: bool) -> None:
    storm = Storm(policy, seed, twice=twice)
    for _ in range(strikes):
        storm.random.choice([storm.wander, storm.progress, storm.again, lambda: None])()
        storm.strike(storm.random.choice(list(Cause)))
    assert fold(storm.life.records) == storm.life.state


@given(policy=policies(), seed=SEEDS, cause=CAUSES)
def test_without_progress_every_limited_ladder_is_held_and_stays_so(
    policy: Recovery, seed: int, cause: Cause
) -> None:
    storm = Storm(policy, seed)
    budget = sum(rung.times or 0 for rung in policy.ladder(cause))
    actions = []
    for _ in range(budget + 3):
        storm.wander()
        actions.append(storm.strike(cause).action)
    if unlimited(policy, cause):
        return
    # A rung that could not be applied may be later, when it happens otherwise: so count.
    assert sum(action not in FINAL for action in actions) <= budget
    assert any(action in FINAL for action in actions)


@LONG
def test_thousands_of_incidents_without_progress_are_held_after_a_handful(number: int) -> None:
    """Somebody starts the run again every time: the budgets stay used, whatever is done."""
    policy = default_recovery()
    limited = [cause for cause in Cause if policy.ladder(cause) and not unlimited(policy, cause)]
    budget = sum(rung.times or 0 for cause in limited for rung in policy.ladder(cause))
    storm = Storm(policy, 1)
    storm.progress()
    going_on = 0
    for _ in range(number):
        going_on += storm.strike(storm.random.choice(limited)).action not in FINAL
    assert 0 < going_on <= budget


def test_a_thousand_incidents_with_progress_in_between_are_all_survived() -> None:
    """Each of them is another trouble: training got past the one before."""
    rollback = {"do": "rollback", "times": 1, "lr_scale": 0.5, "ramp_steps": 200}
    storm = Storm(Recovery.model_validate({"non_finite": [rollback]}), 3)
    for number in range(1_000):
        storm.progress()
        if number % 50 == 0:
            names = [str(each.name) for each in storm.life.state.known[:-5]]
            storm.life.prune(names)
        cause = storm.random.choice((Cause.NON_FINITE, Cause.HANG, Cause.CRASH))
        decision = storm.strike(cause, ahead=True)
        assert decision.action not in FINAL, (number, decision.reason)


#: What ends an attempt and is not somebody's wish.
COMING = [cause for cause in Cause if cause not in (Cause.USER_CANCELLED, Cause.STOP_REQUESTED)]


def most_without_progress(policy: Recovery) -> int:
    """Whatever changes a parameter is another try, of as many attempts as may get nowhere."""
    limits = policy.limits
    row = max(limits.attempts_without_progress, limits.interruptions_without_progress)
    budgets = sum(rung.times or 16 for cause in COMING for rung in policy.ladder(cause))
    return row * (budgets + 1)


@LONG
def test_thousands_of_incidents_of_every_cause_without_progress_all_end(number: int) -> None:
    """With those that have no limit: run after run is held, soon, and says why."""
    struck = seed = 0
    policy = default_recovery()
    while struck < number:
        storm = Storm(policy, seed)
        if seed % 2:
            storm.progress()
        length = 1
        while storm.goes_on(COMING):
            storm.wander()
            length += 1
            assert length < 150, "as good as endless"
        assert "; next: " in storm.life.decisions[-1].reason
        struck, seed = struck + length, seed + 1


@pytest.mark.parametrize("cause", sorted(COMING))
def test_one_cause_alone_without_progress_comes_to_an_end(cause: Cause) -> None:
    storm = Storm(default_recovery(), 5)
    length = 1
    while storm.goes_on([cause]):
        length += 1
    assert length <= 10
    assert storm.life.state.status is RunStatus.HELD


@given(policy=policies(), seed=SEEDS)
def test_any_policy_without_progress_comes_to_an_end(policy: Recovery, seed: int) -> None:
    storm = Storm(policy, seed)
    most = most_without_progress(policy)
    length = 1
    while storm.goes_on(COMING):
        length += 1
        assert length <= most


def test_a_storm_with_progress_goes_on_until_the_starts_are_used_up() -> None:
    policy = default_recovery().model_copy(update={"limits": Limits(starts=600)})
    # The others have an end of their own: a micro-batch of one, samples enough left out.
    # A slow node is only told of.
    held = {Cause.ENV_MISMATCH, Cause.RANK_MISMATCH}
    own_end = {*held, Cause.CUDA_OOM, Cause.HOST_OOM, Cause.STRAGGLER, *UNSTABLE}
    causes = [cause for cause in COMING if cause not in own_end]
    storm = Storm(policy, 11)
    while storm.goes_on(causes, ahead=True):
        pass
    assert "600 starts in all" in storm.life.decisions[-1].reason
    starts = sum(len(each.launches) for each in storm.life.state.attempts)
    assert starts == 600


@given(seed=SEEDS, share=st.floats(0.0, 1.0))
def test_with_some_progress_it_is_held_only_where_there_was_none(seed: int, share: float) -> None:
    storm = Storm(default_recovery(), seed)
    since_progress = 0
    for _ in range(150):
        further = storm.random.random() < share
        since_progress = 0 if further else since_progress + 1
        if not storm.goes_on([Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NODE_FAIL], ahead=further):
            assert since_progress >= 3
            return
        assert since_progress < 10


@given(policy=policies(), seed=SEEDS, strikes=st.integers(1, 30))
def test_what_is_written_twice_counts_once(policy: Recovery, seed: int, strikes: int) -> None:
    once, twice = Storm(policy, seed), Storm(policy, seed, twice=True)
    for storm in (once, twice):
        for _ in range(strikes):
            storm.random.choice([storm.wander, storm.progress, storm.again])()
            storm.strike(storm.random.choice(list(Cause)))
    assert once.life.decisions == twice.life.decisions
    for part in ("plan", "spent", "known", "status", "rollback", "applied", "high_water"):
        assert getattr(once.life.state, part) == getattr(twice.life.state, part), part


@given(policy=policies(), seed=SEEDS, cause=CAUSES)
def test_the_same_state_gives_the_same_decision(policy: Recovery, seed: int, cause: Cause) -> None:
    storm = Storm(policy, seed)
    for _ in range(5):
        storm.wander()
        storm.strike(cause)
    state, seen = storm.life.state, incident(cause, 999)
    assert decide(policy, state, seen) == decide(policy, fold(storm.life.records), seen)


def test_no_plan_can_change_the_global_batch_or_the_order_of_the_samples() -> None:
    assert {each.name for each in fields(RecoveryPlan)} == {
        "lr_factor",
        "lr_from_step",
        "lr_ramp_steps",
        "micro_batch",
        "mem_factor",
        "exclude_nodes",
        "skipped",
        "reseeded",
        "worker_factor",
        "time_factor",
        "nodes",
        "variables",
        "variables_past",
        "abandoned",
    }


def test_the_windows_of_a_storm_keep_whole_batches() -> None:
    storm = Storm(default_recovery(), 7)
    for _ in range(100):
        storm.progress()
        storm.strike(Cause.NON_FINITE)
    windows = storm.life.state.plan.skipped
    assert windows and total(windows)
    assert all(each.first % BATCH == each.stop % BATCH == 0 for each in windows)
