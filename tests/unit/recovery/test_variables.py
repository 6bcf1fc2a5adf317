"""The site's variables for after a hang: which rungs bring them, and when they go again."""

from __future__ import annotations

import pytest

from slurm_forge.control.brief import LaunchBrief
from slurm_forge.documents import build, load
from slurm_forge.errors import ConfigError
from slurm_forge.journal import events as ev
from slurm_forge.json_codec import parse
from slurm_forge.recovery import decide
from slurm_forge.spec.recovery import Recovery, default_recovery
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Change, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan, Variable
from tests.unit.recovery.life import Life, incident

SET = (Variable("NCCL_DEBUG", "INFO"), Variable("NCCL_IB_TIMEOUT", "23"))
TEXT = "NCCL_DEBUG=INFO NCCL_IB_TIMEOUT=23"


def policy(text: str) -> Recovery:
    return build(Recovery, load(text, "job.yaml"))


class Run(Life):
    """A life at a site that has such a set."""

    def strikes(self, cause: Cause, on_hang: tuple[Variable, ...] = SET) -> Decision:
        seen = incident(cause, id=f"{self.number}.{len(self.decisions)}")
        self.tell(ev.IncidentSeen(incident=seen))
        decision = decide(self.policy, self.state, seen, now=self.now, on_hang=on_hang)
        self.decisions.append(decision)
        self.tell(ev.DecisionTaken(decision=decision))
        return decision

    def saves(self, step: int, findings: tuple[str, ...] = ()) -> None:
        name = f"step-{step:08d}.a{self.number}.l{self.launch}-0000abcd"
        self.tell(
            ev.CheckpointCommitted(
                name=name, step=step, reason="", seconds=1.0, size=1, findings=findings
            )
        )


@pytest.mark.parametrize("cause", list(Cause))
def test_hangs_and_errors_of_nccl_bring_them_and_nothing_else_does(cause: Cause) -> None:
    run = Run()
    brings = cause in (Cause.HANG, Cause.NCCL_ERROR)
    assert run.strikes(cause).plan.variables == (SET if brings else ())
    assert run.state.plan.variables == (SET if brings else ())


def test_the_decision_says_so_once() -> None:
    run = Run()
    assert run.strikes(Cause.HANG).changes == (Change("variables", "", TEXT),)
    assert run.strikes(Cause.HANG).changes == ()
    requeued = run.strikes(Cause.HANG)
    assert requeued.plan.variables == SET
    assert [each.parameter for each in requeued.changes] == ["exclude_nodes"]


def test_a_site_without_such_a_set_changes_nothing() -> None:
    decision = Run().strikes(Cause.HANG, ())
    assert (decision.plan, decision.changes) == (RecoveryPlan(), ())


def test_they_stay_until_a_checkpoint_lies_past_the_trouble() -> None:
    run = Run()
    run.strikes(Cause.HANG)  # at step 100
    run.saves(90)
    run.strikes(Cause.CRASH)
    assert run.state.plan.variables == SET, "another trouble has taken them away"
    run.saves(100)
    assert run.state.plan.variables == SET, "it is where it hung"
    run.saves(120, findings=("not finite",))
    assert run.state.plan.variables == SET, "what will not be resumed from is no progress"
    run.saves(140)
    assert run.state.plan == RecoveryPlan()
    assert run.strikes(Cause.HANG).changes == (Change("variables", "", TEXT),)


def test_a_program_that_keeps_its_own_checkpoints_gets_past_it_too() -> None:
    run = Run()
    run.strikes(Cause.NCCL_ERROR)
    run.tell(ev.Advanced(what="a new file"))
    assert run.state.plan.variables == ()


def test_a_rung_says_otherwise() -> None:
    run = Run(
        policy(
            "hang: [{do: relaunch, times: 1}, {do: requeue, times: 1, variables: none}]\n"
            "crash: [{do: relaunch, times: 1}, {do: requeue, times: 1, variables: on_hang}]\n"
            "nccl_error: [{do: relaunch, times: 1, variables: none}]\n"
        )
    )
    assert run.strikes(Cause.NCCL_ERROR).plan.variables == ()
    assert run.strikes(Cause.HANG).plan.variables == SET
    switched = run.strikes(Cause.HANG)
    assert switched.plan.variables == ()
    assert switched.changes == (Change("variables", TEXT, ""),)
    assert run.strikes(Cause.CRASH).plan.variables == ()
    assert run.strikes(Cause.CRASH).plan.variables == SET


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hang: [{do: relaunch, times: 1, variables: onhang}]", 'did you mean "on_hang"'),
        ("hang: [{do: relaunch, times: 1, env: on_hang}]", 'did you mean "variables"'),
        ("hang: [{do: hold, variables: none}]", 'does not belong to "do: hold"'),
        (
            "cuda_oom: [{do: relaunch, times: 1, variables: on_hang}]",
            "cuda_oom[0].variables: the site's post-hang variables are for",
        ),
        ("hang: [{do: relaunch, times: 1, variables: null}]", ""),
        ("cuda_oom: [{do: relaunch, times: 1, variables: none}]", ""),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    if not message:
        policy(text)
        return
    with pytest.raises(ConfigError) as mistake:
        policy(text)
    assert message in str(mistake.value)


def test_what_was_written_is_read_back() -> None:
    text = "hang: [{do: relaunch, times: 1, variables: none}]"
    again = Recovery.model_validate(policy(text).model_dump(mode="json"))
    assert again == policy(text)
    assert "variables" not in default_recovery().model_dump(mode="json")["hang"][0]


def test_the_brief_of_a_launch_carries_them() -> None:
    plan = RecoveryPlan(variables=SET, variables_past=7)
    brief = LaunchBrief(attempt=1, launch=2, plan=plan, committed_step=None)
    assert parse(LaunchBrief, brief.to_text()) == brief
