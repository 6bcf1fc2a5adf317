"""Attempts that end without a word: the next start finds out, or rank 0 stands in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from slurm_forge.errors import FencedError, SlurmUnreachableError
from slurm_forge.journal import RunState, RunStatus, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import (
    Attempt,
    StartRefusal,
    begin,
)
from slurm_forge.launch.requeue.requeue import RequeueOutcome
from slurm_forge.launch.submit.submission import note
from slurm_forge.launch.supervisor.deputy import bring_back
from slurm_forge.recovery import LaunchFacts
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.records import (
    AccountingRecord,
    ConfigRecord,
    JobRecord,
    NodeRecord,
    PartitionRecord,
)
from slurm_forge.slurm.states import JobState, parse_state
from slurm_forge.slurm.text.answers import (
    RequeueAnswer,
    RequeueReply,
)
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action

RUNNING = JobRecord(job_id=42, name="x", state=JobState.RUNNING, state_text="RUNNING")


@dataclass
class Answers:
    """A Slurm that knows one job, and remembers what it was asked to do."""

    job: JobRecord | None = RUNNING
    #: How each of its starts so far has ended, by accounting, and how many there were.
    ended: str = ""
    starts: int = 1
    #: By how much the controller's clock is ahead of ours.
    ahead: timedelta = timedelta()
    down: tuple[str, ...] = ()
    reachable: bool = True
    asked: list[str] = field(default_factory=list)

    def _reach(self, what: str) -> None:
        if not self.reachable:
            raise SlurmUnreachableError([what], 1, "no controller")

    def show_job(self, job: str) -> JobRecord | None:
        self._reach("scontrol")
        return self.job

    def show_config(self) -> ConfigRecord:
        self._reach("scontrol")
        return ConfigRecord(cluster_name="hill", auth_info=("cred_expire=5",))

    def accounting(self, job: str) -> tuple[AccountingRecord, ...]:
        self._reach("sacct")
        if not self.ended:
            return ()
        began = datetime.now(timezone.utc) - timedelta(seconds=1) + self.ahead
        row = AccountingRecord(
            job_ref=job,
            step=None,
            job_id=int(job),
            state=parse_state(self.ended),
            state_text=self.ended,
            start_time=began,
            end_time=began + timedelta(seconds=2),
        )
        return (row,) * self.starts

    def show_nodes(self, names: Sequence[str]) -> tuple[NodeRecord, ...]:
        self._reach("scontrol")
        return tuple(
            NodeRecord(name=name, state=("DOWN",) if name in self.down else ("IDLE",))
            for name in names
        )

    def show_partitions(self) -> tuple[PartitionRecord, ...]:
        self._reach("scontrol")
        return ()

    def requeue(self, job: str) -> RequeueReply:
        self.asked.append(f"requeue {job}")
        return RequeueReply(RequeueAnswer.REQUEUED, "")

    def requeue_hold(self, job: str) -> RequeueReply:
        self.asked.append(f"requeuehold {job}")
        return RequeueReply(RequeueAnswer.REQUEUED, "")

    def update_job(self, job: str, update: JobUpdate) -> None:
        self.asked.append(f"update {job}")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.at(tmp_path / "tiny")
    spec = job_from_mapping({"name": "tiny", "entry": "a.b:train"})
    file = RunFile(submitted_from=str(tmp_path), python=sys.executable, job=spec)
    run.create(file.to_yaml().encode())
    return run


def start(
    run: RunDirectory, slurm: Answers | None = None, *, restarts: int = 0
) -> Attempt | StartRefusal:
    return begin(
        run,
        job="42",
        restart_count=restarts,
        nodes=("n1", "n2"),
        via="sbatch",
        slurm=slurm,  # type: ignore[arg-type]
    )


def trained(run: RunDirectory, slurm: Answers | None = None, *, restarts: int = 0) -> Attempt:
    """An attempt that has launched and made some steps."""
    attempt = start(run, slurm, restarts=restarts)
    assert isinstance(attempt, Attempt)
    attempt.launch = attempt.journal.launch = 1
    attempt.journal.write(ev.LaunchStarted(world_size=2, nodes=("n1", "n2")))
    attempt.journal.write(ev.Progress(step=17))
    return attempt


def state_of(run: RunDirectory) -> RunState:
    return fold(read_journal(run)[0])


# -- the next start finds out ----------------------------------------------------------------------


def test_the_next_attempt_says_how_the_last_one_ended(run: RunDirectory) -> None:
    trained(run)
    after = start(run, Answers(ended="NODE_FAIL", down=("n2",)), restarts=1)
    assert isinstance(after, Attempt) and after.verdict is None
    state = state_of(run)
    first, second = state.attempts
    ((_, incident),) = first.incidents
    assert (incident.id, incident.cause, incident.hosts) == ("1.1", Cause.NODE_FAIL, ("n2",))
    assert incident.step == 17
    assert [d.action for _, d in first.decisions] == [Action.REQUEUE]
    assert second.incidents == () and state.status is RunStatus.RUNNING


@pytest.mark.parametrize("hours", [-3, 3])
def test_how_it_ended_is_found_though_slurms_clock_is_hours_off(
    run: RunDirectory, hours: int
) -> None:
    trained(run)
    start(run, Answers(ended="TIMEOUT", ahead=timedelta(hours=hours)), restarts=1)
    ((_, incident),) = state_of(run).attempts[0].incidents
    assert (incident.cause, incident.confidence) == (Cause.TIME_LIMIT, Confidence.CERTAIN)


def test_an_attempt_that_said_itself_how_it_ended_is_believed(run: RunDirectory) -> None:
    attempt = trained(run)
    now = datetime.now(timezone.utc)
    job = replace(RUNNING, preempt_time=now)
    attempt.conclude(LaunchFacts(now=now, step=17, rank_signals=("SIGTERM",), job_at_notice=job))
    # Killed before it could write its last line.
    start(run, Answers(ended="NODE_FAIL"), restarts=1)
    ((_, incident),) = state_of(run).attempts[0].incidents
    assert incident.cause is Cause.PREEMPTED


def test_it_is_found_out_once(run: RunDirectory) -> None:
    trained(run)
    for restarts in (1, 2):
        start(run, Answers(ended="NODE_FAIL"), restarts=restarts)
    state = state_of(run)
    assert [len(a.incidents) for a in state.attempts] == [1, 1, 0]


def test_without_slurm_it_is_a_guess_and_the_run_goes_on(run: RunDirectory) -> None:
    trained(run)
    after = start(run, Answers(reachable=False), restarts=1)
    assert isinstance(after, Attempt) and after.verdict is None
    ((_, incident),) = state_of(run).attempts[0].incidents
    assert incident.confidence is Confidence.GUESS


def test_supervisors_that_die_again_and_again_end_in_a_hold(run: RunDirectory) -> None:
    """Slurm starts the job each time, for ever: nobody else would stop it."""
    starts = 0
    attempt: Attempt | StartRefusal = trained(run)
    while isinstance(attempt, Attempt) and attempt.verdict is None and starts < 50:
        starts += 1
        attempt = start(run, Answers(ended="FAILED", starts=starts), restarts=starts)
        if isinstance(attempt, Attempt) and attempt.verdict is None:
            attempt.journal.write(ev.LaunchStarted(world_size=2, nodes=("n1", "n2")))
    assert isinstance(attempt, Attempt) and attempt.verdict is not None
    assert attempt.verdict.action is Action.HOLD
    assert starts <= 5
    attempt.end("hold")
    assert start(run, Answers(), restarts=99) is StartRefusal.AT_REST


def test_a_person_who_starts_it_again_has_decided(run: RunDirectory) -> None:
    for restarts in range(6):
        trained(run, Answers(ended="FAILED"), restarts=restarts)
        note(run, ev.UserAsked(verb="requeue", user="me"))
    state = state_of(run)
    assert all(not a.decisions for a in state.attempts)
    assert state.attempts[0].incidents, "told all the same"


def test_more_memory_is_asked_for_before_the_next_start_trains(tmp_path: Path) -> None:
    """Slurm has started the job again with as much as was too little."""
    run = RunDirectory.at(tmp_path / "hungry")
    resources = {"mem": "4G", "time": "01:00:00"}
    spec = job_from_mapping({"name": "hungry", "entry": "a.b:t", "resources": resources})
    file = RunFile(submitted_from=str(tmp_path), python=sys.executable, job=spec)
    run.create(file.to_yaml().encode())
    trained(run)
    after = start(run, Answers(ended="OUT_OF_MEMORY"), restarts=1)
    assert isinstance(after, Attempt) and after.verdict is not None
    assert after.verdict.action is Action.RAISE_MEM
    assert state_of(run).attempts[-1].number == 1, "it does not begin"


# -- a held job that somebody releases -------------------------------------------------------------


def test_whoever_releases_a_held_job_lets_the_run_go_on(run: RunDirectory) -> None:
    attempt = trained(run)
    attempt.journal.write(ev.Held(job="42", restart_count=0, reason="why", confirmed=True))
    now = datetime.now(timezone.utc)
    facts = LaunchFacts(now=now, step=3, exit_status=1)
    while attempt.conclude(facts).action is not Action.HOLD:  # type: ignore[union-attr]
        attempt.launch += 1
    attempt.end("held")
    assert state_of(run).status is RunStatus.HELD
    assert start(run, restarts=0) is StartRefusal.AT_REST, "the same start again is nobody's wish"
    after = start(run, restarts=1)
    assert isinstance(after, Attempt)
    state = state_of(run)
    assert (state.status, state.held) == (RunStatus.RUNNING, None)
    assert state.asked_after == 1


def test_a_hold_that_slurm_never_confirmed_is_nobodys_release(run: RunDirectory) -> None:
    attempt = trained(run)
    now = datetime.now(timezone.utc)
    facts = LaunchFacts(now=now, step=3, exit_status=1)
    while attempt.conclude(facts).action is not Action.HOLD:  # type: ignore[union-attr]
        attempt.launch += 1
    attempt.journal.write(ev.Held(job="42", restart_count=0, reason="why"))
    assert start(run, restarts=1) is StartRefusal.AT_REST, "Slurm has started it by itself"


# -- rank 0 stands in for a supervisor that is gone ------------------------------------------------


def stand_in(run: RunDirectory, slurm: Answers, attempt: int = 1, *, dead: bool = True) -> str:
    return bring_back(
        run,
        knobs=Knobs(attempt=attempt, launch=1, nodes="off"),
        job="42",
        slurm=slurm,  # type: ignore[arg-type]
        lives=(lambda _: False) if dead else None,
        pause=lambda _: None,
    )


def test_nobody_stands_in_for_a_supervisor_that_lives(run: RunDirectory) -> None:
    trained(run)  # by this very process
    slurm = Answers()
    assert stand_in(run, slurm, dead=False) == "nothing to do"
    assert slurm.asked == []


def test_a_rank_brings_the_run_back_when_the_supervisor_is_gone(run: RunDirectory) -> None:
    trained(run)
    gone = replace(RUNNING, state=JobState.COMPLETING, reason="JobLaunchFailure", exit_code=(0, 9))
    slurm = Answers(gone)
    assert "requeued" in stand_in(run, slurm)
    assert slurm.asked[0] == "requeue 42"
    state = state_of(run)
    ((_, incident),) = state.attempts[0].incidents
    assert (incident.cause, incident.step) == (Cause.CRASH, 17)
    told = " ".join(each.text for each in incident.evidence)
    assert "supervisor" in told and "ExitCode=0:9" in told
    assert (state.status, state.attempts[0].outcome) == (RunStatus.REQUEUED, "requeued")
    assert [d.action for _, d in state.attempts[0].decisions] == [Action.REQUEUE], "no relaunch"
    # The start that follows has nothing to find out.
    start(run, Answers(ended="FAILED"), restarts=1)
    assert len(state_of(run).attempts[0].incidents) == 1


@pytest.mark.parametrize("by", ["failed_node", "restarts"])
def test_what_slurm_has_requeued_already_is_not_requeued_again(run: RunDirectory, by: str) -> None:
    trained(run)
    values = {"restarts": 1} | ({"failed_node": "n1"} if by == "failed_node" else {})
    slurm = Answers(replace(RUNNING, **values))  # type: ignore[arg-type]
    stand_in(run, slurm)
    assert slurm.asked == []
    assert state_of(run).status is RunStatus.REQUEUED


def test_a_node_that_failed_in_an_earlier_start_explains_nothing_now(run: RunDirectory) -> None:
    trained(run)
    gone = replace(RUNNING, state=JobState.COMPLETING, reason="JobLaunchFailure", failed_node="n7")
    slurm = Answers(gone)
    stand_in(run, slurm)
    assert slurm.asked[0] == "requeue 42"


def test_nothing_is_done_after_a_supervisor_that_ended_on_purpose(run: RunDirectory) -> None:
    attempt = trained(run)
    attempt.end("held")
    slurm = Answers()
    assert stand_in(run, slurm) == "nothing to do"
    run.mark_done(20, 1)
    assert stand_in(run, slurm) == "nothing to do"
    assert slurm.asked == []


def test_a_rank_of_an_attempt_that_was_taken_over_stands_in_for_nobody(run: RunDirectory) -> None:
    trained(run)
    trained(run, restarts=1)
    slurm = Answers()
    with pytest.raises(FencedError):
        stand_in(run, slurm)
    assert slurm.asked == []


def test_after_scancel_nobody_stands_in(run: RunDirectory) -> None:
    trained(run)
    slurm = Answers(replace(RUNNING, state=JobState.CANCELLED))
    stand_in(run, slurm)
    assert slurm.asked == []
    assert state_of(run).status is RunStatus.CANCELLED


def test_supervisors_that_are_lost_time_and_again_are_held_by_the_rank(run: RunDirectory) -> None:
    asked: list[str] = []
    for number in range(1, 9):
        attempt = trained(run, restarts=number - 1)
        slurm = Answers(replace(RUNNING, restarts=number - 1))
        stand_in(run, slurm, attempt.claim.attempt)
        asked += slurm.asked
        if state_of(run).status is RunStatus.HELD:
            break
    assert [word for word in asked if word.startswith("requeuehold")], asked
    assert len(asked) <= 6
    assert state_of(run).attempts[-1].outcome == RequeueOutcome.HELD.value
