"""Which of its own checkpoints a program is told to go back to."""

from __future__ import annotations

from dataclasses import replace

from slurm_forge.journal.state import Rollback, RunState
from slurm_forge.recovery.incident.launch_facts import ProgramCheckpoint, ProgramCheckpoints
from slurm_forge.recovery.policy.decide import decide
from slurm_forge.spec.recovery import default_recovery
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Decision, Incident

GOOD = tuple(ProgramCheckpoint(step, step, f"c-{step}") for step in (30, 20, 10))


def decided(state: RunState, program: ProgramCheckpoints, number: int = 1) -> Decision:
    incident = Incident(
        id=f"1.{number}",
        cause=Cause.NON_FINITE,
        confidence=Confidence.LIKELY,
        step=36,
        onset=33,
    )
    return decide(default_recovery(), state, incident, program=program)


def after(decision: Decision) -> RunState:
    return RunState(plan=decision.plan, rollback=Rollback(36, None, 36))


def test_the_newest_good_one_and_the_same_trouble_again_one_further_back() -> None:
    first = decided(RunState(), ProgramCheckpoints(GOOD, newest_ns=35))
    assert (first.action, first.target) == (Action.ROLLBACK, "c-30")
    assert not first.changes, "its learning rate is its own"
    (left,) = first.plan.abandoned
    assert left.covers(35, 35) and not left.covers(30, 30) and not left.covers(35, 36)

    second = decided(after(first), ProgramCheckpoints(GOOD, newest_ns=40), 2)
    assert second.target == "c-20"
    assert "further back than last time" in second.reason
    # Past the trouble of before: another one's.
    past = replace(after(first), rollback=None)
    assert decided(past, ProgramCheckpoints(GOOD, newest_ns=40), 2).target == "c-30"


def test_from_the_start_where_none_is_good() -> None:
    decision = decided(RunState(), ProgramCheckpoints((), newest_ns=35))
    assert (decision.action, decision.target) == (Action.ROLLBACK, None)
    assert decision.plan.abandoned[0].covers(5, 5)
    assert "from the start" in decision.reason


def test_a_program_that_can_not_be_told_is_held() -> None:
    decision = decided(RunState(), ProgramCheckpoints(refusal="it chooses itself"))
    assert decision.action is Action.HOLD
    assert "no rollback: it chooses itself" in decision.reason
