"""When going on would be a loop: told before a ladder is asked, and with what to do about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.journal import events as ev
from slurm_forge.journal.fold import fold
from slurm_forge.journal.state import RunStatus
from slurm_forge.recovery import decide
from slurm_forge.spec.recovery import Recovery
from slurm_forge.vocabulary.cause import Cause, Evidence
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.trust import Trust
from tests.unit.recovery.life import Life, incident

#: Budgets that never end a ladder here: what holds is what is looked at.
MANY = 1000
INTERRUPTIONS = (Cause.PREEMPTED, Cause.NODE_FAIL, Cause.ADMIN_REQUEUE)
CIRCUMSTANCES = (*INTERRUPTIONS, Cause.EXTERNAL_SERVICE, Cause.STORAGE)
#: Those without a rule of their own about what looks the same.
FAULTS = (
    Cause.TIME_LIMIT, Cause.HANG, Cause.NCCL_ERROR, Cause.GPU_ERROR, Cause.CUDA_OOM, Cause.UNKNOWN,
    Cause.HOST_OOM, Cause.CRASH, Cause.APP_ERROR,
)  # fmt: skip


def patient(**limits: int) -> Recovery:
    """Requeues whatever comes, nearly for ever."""
    ladders = {
        cause.value: [{"do": "requeue", "times": MANY}]
        for cause in Cause
        if cause not in (Cause.USER_CANCELLED, Cause.STOP_REQUESTED)
    }
    return Recovery.model_validate({**ladders, "limits": limits})


def held_after(life: Life, cause: Cause, most: int = 30, **changes: object) -> int | None:
    """How many attempts end with a cause until the run is held; None if it never is."""
    for count in range(1, most + 1):
        if life.happens(cause, **changes).action is Action.HOLD:
            return count
        life.attempt()
    return None


@pytest.mark.parametrize("usage_error", [True, False])
def test_only_what_no_other_start_changes_is_held_at_once(usage_error: bool) -> None:
    told = words("UsageError: run.batches(until=60) does not say whether steps or epochs are meant")
    held = held_after(Life(patient()), Cause.APP_ERROR, evidence=told, usage_error=usage_error)
    assert held == (1 if usage_error else 2)


def words(text: str) -> tuple[Evidence, ...]:
    return (Evidence("rank 0 on n1", text),)


def end(life: Life, cause: Cause, **changes: object) -> Decision:
    """An attempt ends with a cause and the next one begins, unless it is held."""
    decision = life.happens(cause, **changes)
    if decision.action is not Action.HOLD:
        life.attempt()
    return decision


# -- attempts that get nowhere ---------------------------------------------------------------------


@pytest.mark.parametrize("cause", FAULTS)
def test_exactly_three_attempts_without_a_checkpoint_are_enough(cause: Cause) -> None:
    life = Life(patient())
    assert held_after(life, cause) == 3
    assert life.state.status is RunStatus.HELD
    reason = life.decisions[-1].reason
    assert f"3 attempts in a row ended without a checkpoint ({cause.value} 3 times)" in reason
    assert "; next: " in reason


@pytest.mark.parametrize("cause", CIRCUMSTANCES)
def test_what_is_nobodys_fault_may_come_ten_times(cause: Cause) -> None:
    life = Life(patient())
    assert held_after(life, cause) == 10
    assert "10 attempts in a row ended without a checkpoint" in life.decisions[-1].reason


def test_by_default_the_time_limit_is_requeued_twice_without_progress() -> None:
    assert held_after(Life(), Cause.TIME_LIMIT) == 3


def test_a_checkpoint_past_the_old_ones_is_progress_and_old_ground_is_none() -> None:
    life = Life(patient())
    life.commit(50)
    end(life, Cause.HANG)
    for step in (20, 50):
        life.commit(step)
        assert end(life, Cause.HANG).action is Action.REQUEUE
    life.commit(51)
    assert end(life, Cause.HANG).action is Action.REQUEUE
    assert held_after(life, Cause.HANG) == 3
    assert "without a checkpoint past step 51" in life.decisions[-1].reason


def test_one_that_is_not_healthy_is_no_progress() -> None:
    life = Life(patient())
    for step in (10, 20):
        life.commit(step, findings=("the loss is nan",))
        assert end(life, Cause.CRASH).action is Action.REQUEUE
    life.commit(30, findings=("the loss is nan",))
    assert end(life, Cause.CRASH).action is Action.HOLD


def test_the_faults_of_a_row_are_counted_through_the_preemptions_between_them() -> None:
    life = Life(patient())
    row = [Cause.CRASH, Cause.PREEMPTED, Cause.HANG, Cause.PREEMPTED, Cause.TIME_LIMIT]
    actions = [end(life, cause).action for cause in row]
    assert actions == [Action.REQUEUE] * 4 + [Action.HOLD]
    told = "5 attempts in a row ended without a checkpoint (preempted 2 times"
    assert told in life.decisions[-1].reason


def test_launches_of_one_attempt_are_one() -> None:
    life = Life(patient())
    assert {life.happens(Cause.HANG).action for _ in range(20)} == {Action.REQUEUE}


def test_one_that_a_person_stopped_counts_for_nothing_and_breaks_nothing() -> None:
    life = Life(patient())
    end(life, Cause.HANG)
    end(life, Cause.USER_CANCELLED)
    end(life, Cause.HANG)
    end(life, Cause.STOP_REQUESTED)
    assert end(life, Cause.HANG).action is Action.HOLD


def test_an_attempt_that_nobody_could_tell_of_counts_as_an_interruption() -> None:
    life = Life(patient())
    for _ in range(8):
        life.attempt()
    assert end(life, Cause.PREEMPTED).action is Action.REQUEUE
    assert end(life, Cause.PREEMPTED).action is Action.HOLD
    assert "for an unknown reason 8 times" in life.decisions[-1].reason


@pytest.mark.parametrize("verb", ["requeue", "run", "release"])
def test_whoever_lets_it_go_on_starts_the_count_anew(verb: str) -> None:
    life = Life(patient())
    assert held_after(life, Cause.HANG) == 3
    life.asked(verb)
    life.attempt()
    assert held_after(life, Cause.HANG) == 3


def test_who_asks_before_it_is_held_is_believed_too() -> None:
    life = Life(patient())
    for _ in range(2):
        end(life, Cause.HANG)
    life.asked()
    life.attempt()
    assert held_after(life, Cause.HANG) == 3


def test_a_held_job_that_was_released_without_a_word_is_counted_anew_too() -> None:
    life = Life(patient())
    assert held_after(life, Cause.HANG) == 3
    life.attempt()
    assert held_after(life, Cause.HANG) == 3


def test_after_a_person_has_gone_back_progress_is_measured_from_there() -> None:
    life = Life(patient())
    name = life.commit(900)
    end(life, Cause.HANG)
    life.judge(name, Trust.SUSPECT, by_person=True)
    life.asked()
    life.attempt()
    for step in range(110, 200, 10):
        life.launched(begin=step - 10, end=step)
        life.commit(step)
        assert end(life, Cause.TIME_LIMIT).action is Action.REQUEUE


def test_after_a_rollback_progress_is_measured_from_where_it_led() -> None:
    policy = Recovery.model_validate(
        {"non_finite": [{"do": "rollback", "times": 1}], "time_limit": [{"do": "requeue"}]}
    )
    life = Life(policy)
    life.commit(100, good=True)
    for step in (500, 900):
        life.commit(step)
    assert life.happens(Cause.NON_FINITE, step=910, onset=450).target is not None
    for step in range(150, 890, 50):
        life.commit(step)
        assert end(life, Cause.TIME_LIMIT).action is Action.REQUEUE, step


def test_a_checkpoint_that_is_given_up_each_time_is_no_progress_for_ever() -> None:
    """Found bad by whoever resumes from it, published again by the next: that leads nowhere."""
    life = Life()
    actions: list[Action] = []
    while Action.HOLD not in actions:
        name = life.commit(110)
        actions.append(end(life, Cause.PREEMPTED).action)
        life.judge(name, Trust.SUSPECT)
    assert len(actions) == 11, "the first of them was progress"


def test_other_parameters_are_another_try() -> None:
    """Memory is raised twice, workers are halved: three attempts, and none like the one before."""
    life = Life(Recovery.model_validate({"host_oom": [{"do": "raise_mem", "times": 8}]}))
    actions = [end(life, Cause.HOST_OOM).action for _ in range(9)]
    assert actions == [Action.RAISE_MEM] * 8 + [Action.HOLD]
    assert "nothing left to try" in life.decisions[-1].reason


def test_other_nodes_are_none() -> None:
    rung = {"do": "requeue", "times": 9, "exclude_node": True}
    life = Life(Recovery.model_validate({"hang": [rung]}))
    for host in ("n1", "n2"):
        assert end(life, Cause.HANG, hosts=(host,)).action is Action.REQUEUE
    assert end(life, Cause.HANG, hosts=("n3",)).action is Action.HOLD


def test_what_is_cured_between_two_steps_is_no_new_attempt() -> None:
    life = Life()
    for cause in (Cause.HANG, Cause.CRASH):
        end(life, cause)
    life.commit(1, findings=("of no use",))
    first = life.happens(Cause.NON_FINITE, in_process=True)
    assert "attempts in a row" not in first.reason


def test_the_limits_are_the_users_to_choose() -> None:
    life = Life(patient(attempts_without_progress=5, interruptions_without_progress=2))
    assert held_after(life, Cause.HANG) == 5
    later = Life(patient(attempts_without_progress=5, interruptions_without_progress=2))
    for step in range(1, 9):
        later.commit(step)
        end(later, Cause.PREEMPTED)
    assert held_after(later, Cause.HANG) == 5
    assert held_after(Life(patient(attempts_without_progress=1)), Cause.HANG) == 1
    limits = patient(attempts_without_progress=2, interruptions_without_progress=4)
    assert held_after(Life(limits), Cause.PREEMPTED) == 4


def test_what_an_attempt_that_is_dead_leaves_to_decide_is_counted_as_its_own() -> None:
    life = Life(patient())
    for _ in range(2):
        end(life, Cause.HANG)
    life.attempt()  # the next one has begun before anybody looked at the third
    late = decide(life.policy, life.state, incident(Cause.HANG, id="3.1"))
    assert late.action is Action.HOLD
    early = decide(life.policy, life.state, incident(Cause.HANG, id="2.9"))
    assert early.action is Action.REQUEUE


# -- the same error once more ----------------------------------------------------------------------

SAME = {
    "first": "ValueError: bad batch at 0x7f3a11 (/data/run-3/train.py:41 in train), pid 4711",
    "again": "ValueError: bad batch at 0x7fbb02 (/data/run-4/train.py:41 in train), pid 99",
}


@pytest.mark.parametrize("cause", [Cause.APP_ERROR, Cause.CHECKPOINT_BAD])
def test_the_same_error_at_the_same_step_is_held_the_second_time(cause: Cause) -> None:
    life = Life(patient())
    end(life, cause, evidence=words(SAME["first"]))
    again = (Evidence("rank 1 on n2", SAME["again"]),)
    decision = end(life, cause, evidence=again, hosts=("n2",))
    assert decision.action is Action.HOLD
    assert decision.reason.startswith(
        f"{cause.value}: the same error at the same step twice in a row; next: "
    )


def test_a_preemption_between_them_does_not_make_them_two() -> None:
    life = Life(patient())
    end(life, Cause.APP_ERROR, evidence=words(SAME["first"]))
    end(life, Cause.PREEMPTED)
    assert "twice in a row" in end(life, Cause.APP_ERROR, evidence=words(SAME["again"])).reason


@pytest.mark.parametrize(
    "changes",
    [
        {"evidence": words("ValueError: another batch (train.py:41 in train)")},
        {"evidence": words(SAME["again"]), "step": 101},
        {"evidence": words(SAME["again"].replace(":41", ":42"))},
        {"evidence": ()},
    ],
)
def test_another_error_or_place_is_another_error(changes: dict[str, object]) -> None:
    life = Life(patient())
    end(life, Cause.APP_ERROR, evidence=words(SAME["first"]))
    assert end(life, Cause.APP_ERROR, **changes).action is Action.REQUEUE


def test_another_error_in_between_breaks_the_row() -> None:
    life = Life(patient(attempts_without_progress=9))
    end(life, Cause.APP_ERROR, evidence=words(SAME["first"]))
    end(life, Cause.HANG)
    assert end(life, Cause.APP_ERROR, evidence=words(SAME["again"])).action is Action.REQUEUE


def crashes(*hosts: str, text: str = "SIGSEGV in forward") -> list[Action]:
    life = Life(patient(attempts_without_progress=9))
    return [
        end(
            life,
            Cause.CRASH,
            hosts=(host,) if host else (),
            evidence=(Evidence(f"rank 3 on {host}", text),),
        ).action
        for host in hosts
    ]


def test_a_crash_on_another_host_is_the_programs_and_on_the_same_one_maybe_the_hosts() -> None:
    go_on, hold = Action.REQUEUE, Action.HOLD
    assert crashes("n1", "n2") == [go_on, hold]
    assert crashes("", "") == [go_on, hold]
    assert crashes("n1", "n1", "n1") == [go_on, go_on, hold]
    assert crashes("n1", "n1", "n2") == [go_on, go_on, hold]


def test_what_nobody_knows_is_never_called_the_same() -> None:
    life = Life(patient(attempts_without_progress=99))
    assert {end(life, Cause.UNKNOWN, evidence=words("gone")).action for _ in range(20)} == {
        Action.REQUEUE
    }


def test_after_a_person_has_mended_it_the_error_is_new() -> None:
    life = Life(patient())
    for text in SAME.values():
        decision = end(life, Cause.APP_ERROR, evidence=words(text))
    assert decision.action is Action.HOLD
    life.asked()
    life.attempt()
    assert end(life, Cause.APP_ERROR, evidence=words(SAME["first"])).action is Action.REQUEUE


# -- launches that never get to training -----------------------------------------------------------


def start(life: Life, cause: Cause, *, begin: int | None, at: int | None) -> Action:
    life.launched(begin=begin, end=at, why=cause.value)
    action = life.happens(cause, step=at, evidence=words(f"another one {len(life.records)}")).action
    life.launch += 1
    return action


@pytest.mark.parametrize(("begin", "at"), [(None, None), (None, 0), (500, 500)])
def test_three_launches_that_fail_before_the_first_step_are_a_crash_loop(
    begin: int | None, at: int | None
) -> None:
    life = Life(patient())
    causes = (Cause.CRASH, Cause.UNKNOWN, Cause.APP_ERROR)
    actions = [start(life, cause, begin=begin, at=at) for cause in causes]
    assert actions == [Action.REQUEUE, Action.REQUEUE, Action.HOLD]
    told = "app_error: 3 launches in a row failed before the first step was done; next: fix"
    assert told in life.decisions[-1].reason


def test_a_launch_that_has_trained_or_was_preempted_is_none_of_them() -> None:
    life = Life(patient(attempts_without_progress=99))
    actions = [start(life, Cause.PREEMPTED, begin=500, at=500) for _ in range(9)]
    for at in (500, 500, 501, 500, 500):
        actions.append(start(life, Cause.CRASH, begin=500, at=at))
    assert set(actions) == {Action.REQUEUE}
    assert start(life, Cause.CRASH, begin=500, at=500) is Action.HOLD


def test_a_preemption_at_the_start_neither_ends_nor_breaks_a_crash_loop() -> None:
    life = Life(patient())
    causes = (Cause.CRASH, Cause.CRASH, Cause.PREEMPTED, Cause.CRASH)
    actions = [start(life, cause, begin=None, at=None) for cause in causes]
    assert actions == [Action.REQUEUE] * 3 + [Action.HOLD]


def test_launches_from_before_a_person_let_it_go_on_are_none_of_them() -> None:
    life = Life(patient(attempts_without_progress=99))
    for _ in range(2):
        assert start(life, Cause.CRASH, begin=None, at=None) is Action.REQUEUE
    life.asked()
    life.attempt()
    actions = [start(life, Cause.CRASH, begin=None, at=None) for _ in range(3)]
    assert actions == [Action.REQUEUE, Action.REQUEUE, Action.HOLD]


def test_a_hang_at_the_start_gets_to_other_nodes() -> None:
    life = Life()
    actions = [start(life, Cause.HANG, begin=None, at=None) for _ in range(3)]
    assert actions == [Action.RELAUNCH, Action.RELAUNCH, Action.REQUEUE]


# -- too often -------------------------------------------------------------------------------------

#: More than enough: nothing but the number of starts is to hold.
FREE = {"attempts_without_progress": 10**6, "interruptions_without_progress": 10**6}


def preempt(life: Life, times: int, every_s: float) -> int | None:
    """Preempted so often, a step further each time; after how many starts it was held."""
    for count in range(1, times + 1):
        life.now += every_s
        life.commit(life.state.high_water + 1)
        if life.happens(Cause.PREEMPTED, step=life.state.high_water).action is Action.HOLD:
            return count
        life.attempt()
    return None


def test_fifty_preemptions_within_an_hour_are_never_held() -> None:
    assert preempt(Life(), 50, every_s=72.0) is None


def test_hundreds_of_preemptions_in_days_of_progress_are_never_held() -> None:
    assert preempt(Life(), 400, every_s=600.0) is None


def test_two_hundred_starts_within_a_day_are_too_many() -> None:
    life = Life()
    assert preempt(life, 1000, every_s=60.0) == 200
    reason = life.decisions[-1].reason
    assert "preempted: 200 starts within 24 hours; next: see why it starts so often" in reason
    assert "recovery.limits.starts_per_day" in reason
    life.asked()
    life.attempt()
    assert preempt(life, 1000, every_s=60.0) == 200


def test_starts_in_the_same_job_count_as_well() -> None:
    life = Life(patient(starts_per_day=6, **FREE))
    for number in range(5):
        life.launch = number + 1
        life.launched(begin=0, end=5, why="hang")
        assert life.happens(Cause.HANG).action is Action.REQUEUE
    life.launch = 6
    life.launched(begin=0, end=5, why="hang")
    assert "6 starts within 24 hours" in life.happens(Cause.HANG).reason


def test_all_starts_together_have_a_limit_too() -> None:
    life = Life(patient(starts=7, **FREE))
    assert held_after(life, Cause.PREEMPTED) == 7
    assert "7 starts in all; next: " in life.decisions[-1].reason
    assert "recovery.limits.starts " in life.decisions[-1].reason


def test_an_attempt_that_ran_for_days_ends_on_another_day() -> None:
    life = Life(patient(starts_per_day=3, **FREE))
    for _ in range(2):
        life.attempt()
    life.now += 200_000
    assert life.happens(Cause.PREEMPTED).action is Action.REQUEUE


def test_without_a_clock_the_newest_start_is_now() -> None:
    life = Life(patient(starts_per_day=3, **FREE))
    for _ in range(2):
        life.now += 100_000
        life.attempt()
    assert decide(life.policy, life.state, incident(Cause.PREEMPTED, id="3.1")).action is (
        Action.REQUEUE
    )
    for _ in range(2):
        life.attempt()
    assert decide(life.policy, life.state, incident(Cause.PREEMPTED, id="5.1")).action is (
        Action.HOLD
    )


# -- whatever happens ------------------------------------------------------------------------------


@given(
    row=st.lists(st.tuples(st.sampled_from([*FAULTS, *CIRCUMSTANCES]), st.booleans()), max_size=40),
    twice=st.booleans(),
)
def test_no_row_without_progress_is_longer_than_its_limit(
    row: list[tuple[Cause, bool]], twice: bool
) -> None:
    life = Life(patient(), twice=twice)
    faults = others = 0
    for number, (cause, further) in enumerate(row):
        if further:
            life.commit(life.state.high_water + 10)
            faults = others = 0
        else:
            fault = cause in FAULTS
            faults, others = faults + fault, others + (not fault)
        evidence = words(f"the {'a' * (number + 1)} error")
        action = end(life, cause, evidence=evidence).action
        expected = (cause in FAULTS and faults >= 3) or faults + others >= 10
        assert (action is Action.HOLD) == expected, number
        if expected:
            break
    assert fold(life.records) == life.state


def test_a_journal_without_attempts_is_no_loop() -> None:
    life = Life()
    life.tell(ev.Note(text="nothing"))
    empty = type(life.state)()
    assert decide(life.policy, empty, incident(Cause.HANG)).action is Action.RELAUNCH
