"""What ``policy test`` says of rungs that wait, take longer, or do with fewer nodes."""

from __future__ import annotations

import json
from datetime import timedelta

from slurm_forge.recovery.policy.rehearsal import (
    Act,
    Assumed,
    Rehearsal,
    rehearse,
)
from slurm_forge.report.encoding import to_json
from slurm_forge.report.submission.policy_text import (
    policy_test,
    policy_text,
)
from slurm_forge.spec import JobSpec, from_yaml
from slurm_forge.spec.recovery import Recovery, Rung
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Change, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan

LADDER = (
    Rung(do=Action.RAISE_TIME, times=1, factor=1.5),
    Rung(do=Action.REQUEUE, times=2, wait=timedelta(minutes=4)),
)
JOB = JobSpec(name="tiny-gpt", entry="a.b:f", recovery=Recovery(time_limit=LADDER))


def strike(number: int, action: Action, *, wait: float, change: Change) -> Act:
    decision = Decision(
        incident_id=str(number),
        cause=Cause.TIME_LIMIT,
        action=action,
        reason=f"time_limit: {action.value}",
        plan=RecoveryPlan(time_factor=1.5),
        changes=(change,),
        rung=number - 1,
        wait_s=wait,
    )
    return Act(number=number, step=100, skipped=0, decision=decision, left=0)


FOUND = Rehearsal(
    cause=Cause.TIME_LIMIT,
    at=100,
    assumed=Assumed(),
    acts=(
        strike(1, Action.RAISE_TIME, wait=0, change=Change("time_factor", "1", "1.5")),
        strike(2, Action.REQUEUE, wait=240, change=Change("nodes", "4", "3")),
    ),
    then=(),
    end=None,
)


def test_waiting_is_told_with_the_rung_and_with_the_decision() -> None:
    text = policy_text(JOB, FOUND)
    assert (
        "raise_time (once, factor 1.5) -> requeue (2 times, 4 min later, longer each time)" in text
    )
    assert "   raise_time   rung 1 of 2, none left\n     time_factor  1 → 1.5\n" in text
    assert "     nodes  4 → 3\n     next start in 4 min\n" in text
    assert text.count("next start in") == 1


def test_waiting_for_programs() -> None:
    body = json.loads(to_json(policy_test(JOB, FOUND)))
    assert [each["wait_s"] for each in body["incidents"]] == [0.0, 240]


def test_the_ladder_of_a_slow_node_does_not_end_in_a_hold() -> None:
    job = from_yaml("name: x\nentry: a:f\nrecovery: {straggler: [{do: requeue, times: 1}]}\n")
    found = rehearse(job, Cause.STRAGGLER, at=1000, repeat=2, assumed=Assumed())
    text = policy_text(job, found)
    assert "ladder:  requeue (once) -> continue\n" in text
    assert "the run continues, slowly" in text
    assert "hold" not in text
