"""The requeuer of a job against a Slurm that answers as it is told to."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.errors import FencedError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.journal import JournalWriter, RunStatus, fold, read_journal
from slurm_forge.journal.events import AttemptStarted, RequeueDone, RequeueFailed, RequeueIntended
from slurm_forge.journal.file import AppendFile
from slurm_forge.launch.requeue.requeue import (
    PATIENCE,
    JobRequeuer,
    RequeueOutcome,
    RequeueResult,
    StopExplainer,
)
from slurm_forge.run_directory import Fence, RunDirectory, claim_attempt
from slurm_forge.slurm.client import JobUpdate, SubprocessSlurm
from slurm_forge.slurm.process import Completed
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import (
    RequeueAnswer,
    RequeueReply,
)
from slurm_forge.vocabulary.cause import Cause

SUCCESSOR = "sbatch --dependency=afterany:42 --begin=now job.sbatch"
SILENT = SlurmUnreachableError(["scontrol"], 124, "no answer")
ENDING = JobRecord(
    job_id=42, name="x", state=JobState.COMPLETING, state_text="COMPLETING", restarts=3
)


@dataclass
class ScriptedSlurm:
    """Answers requeues in turn (the last for ever); remembers what it was asked."""

    replies: list[RequeueAnswer]
    job: JobRecord | SlurmCommandError | None = None
    submit_error: SlurmCommandError | None = None
    update_error: SlurmCommandError | None = None
    asked: list[str] = field(default_factory=list)

    def requeue_hold(self, job: str) -> RequeueReply:
        reply = self.requeue(job)
        self.asked[-1] = f"requeuehold {job}"
        return reply

    def requeue(self, job: str) -> RequeueReply:
        self.asked.append(f"requeue {job}")
        outcome = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return RequeueReply(outcome, f"slurm says {outcome.value}")

    def show_job(self, job: str) -> JobRecord | None:
        if isinstance(self.job, SlurmCommandError):
            raise self.job
        return self.job

    def hold(self, job: str) -> None:
        self.asked.append(f"hold {job}")

    def submit(self, script: Path, args: Sequence[str] = ()) -> str:
        self.asked.append(f"sbatch {' '.join(args)} {script.name}")
        if self.submit_error is not None:
            raise self.submit_error
        return "77"

    def update_job(self, job: str, update: JobUpdate) -> None:
        self.asked.append(f"update {job} {' '.join(update.assignments())}")
        if self.update_error is not None:
            raise self.update_error


class EndsMeanwhile(ScriptedSlurm):
    def requeue(self, job: str) -> RequeueReply:
        self.job = ENDING
        return super().requeue(job)


@dataclass
class Explains:
    """Knows what the job is ended for; ``is_open``: once Slurm says so."""

    means: Cause | None
    known: JobRecord | None = None
    is_open: bool = False

    def is_needed(self) -> bool:
        return self.is_open

    def cause(self, record: JobRecord | None) -> Cause | None:
        return self.means

    def record(self) -> JobRecord | None:
        return self.known


class Waits(list[float]):
    """Sleeping, on a clock that only moves by it."""

    def now(self) -> float:
        return sum(self)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "runs" / "r")
    made.create(b"x")
    return made


def claim(run: RunDirectory) -> int:
    return claim_attempt(
        run, job="42", restart_count=0, host="n1", pid=1, nodes=("n1",), time=0.0
    ).attempt


def climb(
    run: RunDirectory,
    slurm: ScriptedSlurm | SubprocessSlurm,
    *,
    script: Path | None = Path("job.sbatch"),
    update: JobUpdate | None = None,
    waits: Waits | None = None,
    wait: timedelta = timedelta(0),
    arguments: Sequence[str] = (),
    hold: str = "",
    only_hold: str | None = None,
    explain: StopExplainer | None = None,
) -> RequeueResult:
    attempt = claim(run)
    waits = Waits() if waits is None else waits
    journal = JournalWriter(run, attempt=attempt, writer="supervisor")
    journal.write(AttemptStarted(job="42", restart_count=0, nodes=("n1",), host="n1", via="sbatch"))
    job_requeuer = JobRequeuer(
        slurm,  # type: ignore[arg-type]
        job="42",
        script=script,
        journal=journal,
        fence=Fence(run, attempt),
        restart_count=3,
        sleep=waits.append,
        clock=waits.now,
        only_hold=only_hold,
        explain=explain,
    )
    if hold:
        return job_requeuer.hold(hold)
    return job_requeuer.requeue("preempted", update, wait=wait, arguments=arguments)


def told(run: RunDirectory) -> list[str]:
    kinds = (RequeueIntended, RequeueDone, RequeueFailed)
    records = [r for r in read_journal(run)[0] if isinstance(r.event, kinds)]
    return [r.event.kind for r in sorted(records, key=lambda r: r.sequence)]


@pytest.mark.parametrize("reply", [RequeueAnswer.REQUEUED, RequeueAnswer.ALREADY_PENDING])
def test_in_the_queue_is_in_the_queue(run: RunDirectory, reply: RequeueAnswer) -> None:
    slurm = ScriptedSlurm([reply])
    assert climb(run, slurm).outcome is RequeueOutcome.REQUEUED
    assert slurm.asked == ["requeue 42"]
    assert told(run) == ["requeue_intended", "requeue_done"]
    state = fold(read_journal(run)[0])
    assert (state.status, state.open_intent, state.job) == (RunStatus.REQUEUED, None, "42")


def test_a_job_that_must_not_requeue_itself_is_held_instead(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED])
    result = climb(run, slurm, only_hold="hill does not let jobs requeue themselves here")
    assert result.outcome is RequeueOutcome.HELD
    assert slurm.asked[-1] == "requeuehold 42"
    assert not any(asked.startswith(("requeue 42", "sbatch")) for asked in slurm.asked)
    state = fold(read_journal(run)[0])
    assert state.status is RunStatus.HELD
    assert state.open_intent is None, "reconcile would requeue it"


def test_a_job_that_was_requeued_by_somebody_else_is_not_requeued_again(run: RunDirectory) -> None:
    back = JobRecord(job_id=42, name="x", state=JobState.PENDING, state_text="PENDING", restarts=4)
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED], job=back)
    result = climb(run, slurm, update=JobUpdate(exclude_nodes=("n3",)))
    assert result.outcome is RequeueOutcome.REQUEUED
    assert slurm.asked == ["update 42 ExcNodeList=n3"]
    assert told(run) == ["requeue_intended", "requeue_done"]


@pytest.mark.parametrize(
    "job",
    [
        JobRecord(job_id=42, name="x", state=JobState.RUNNING, state_text="R", restarts=3),
        SlurmUnreachableError(["scontrol"], 1, "no controller"),
    ],
)
def test_what_slurm_does_not_know_to_be_back_is_requeued(
    run: RunDirectory, job: JobRecord | SlurmCommandError
) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED], job=job)
    assert climb(run, slurm).outcome is RequeueOutcome.REQUEUED
    assert slurm.asked == ["requeue 42"]


@pytest.mark.parametrize(("restarts", "asked"), [(4, []), (3, ["requeue 42"])])
def test_a_job_that_was_back_before_slurm_fell_silent_is_not_requeued_again(
    run: RunDirectory, restarts: int, asked: list[str]
) -> None:
    """That would revive it if a person has cancelled it in the queue."""

    explain = Explains(Cause.ADMIN_REQUEUE, replace(ENDING, restarts=restarts))
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED], job=SILENT)
    assert climb(run, slurm, explain=explain).outcome is RequeueOutcome.REQUEUED
    assert slurm.asked == asked


def test_a_hold_that_slurm_has_not_answered_is_not_believed(run: RunDirectory) -> None:
    """Slurm may start the job by itself, and nobody has released anything."""
    sure: list[bool] = []

    class Looking(ScriptedSlurm):
        def requeue_hold(self, job: str) -> RequeueReply:
            held = fold(read_journal(run)[0]).held
            sure.append(held is not None and held.confirmed)
            return super().requeue_hold(job)

    replies = [RequeueAnswer.UNREACHABLE, RequeueAnswer.REQUEUED]
    assert climb(run, Looking(list(replies)), hold="why").outcome is RequeueOutcome.HELD
    held = fold(read_journal(run)[0]).held
    assert sure == [False, False] and held is not None and held.confirmed
    silent = ScriptedSlurm([RequeueAnswer.UNREACHABLE])
    assert climb(run, silent, hold="why").outcome is RequeueOutcome.HELD_IN_JOURNAL
    assert fold(read_journal(run)[0]).held is None


def test_the_intent_is_on_disk_before_slurm_is_asked(run: RunDirectory) -> None:
    seen: list[list[str]] = []

    class Looking(ScriptedSlurm):
        def requeue(self, job: str) -> RequeueReply:
            seen.append(told(run))
            return super().requeue(job)

    climb(run, Looking([RequeueAnswer.REQUEUED]))
    assert seen == [["requeue_intended"]]


def test_a_busy_controller_is_asked_again_and_not_for_ever(run: RunDirectory) -> None:
    waits = Waits()
    slurm = ScriptedSlurm([RequeueAnswer.TRY_AGAIN, RequeueAnswer.REQUEUED])
    assert climb(run, slurm, waits=waits).outcome is RequeueOutcome.REQUEUED
    assert len(waits) == 1
    busy = ScriptedSlurm([RequeueAnswer.TRY_AGAIN])
    assert climb(run, busy).outcome is RequeueOutcome.SUCCESSOR
    assert busy.asked == ["requeue 42"] * 3 + [SUCCESSOR]


def test_a_controller_that_is_away_is_waited_for_and_not_for_ever(run: RunDirectory) -> None:
    waits = Waits()
    back = ScriptedSlurm([*[RequeueAnswer.UNREACHABLE] * 26, RequeueAnswer.REQUEUED])
    assert climb(run, back, waits=waits).outcome is RequeueOutcome.REQUEUED
    assert 60 < waits.now() < PATIENCE.total_seconds()
    silent, waits = ScriptedSlurm([RequeueAnswer.UNREACHABLE]), Waits()
    assert climb(run, silent, waits=waits).outcome is RequeueOutcome.PENDING
    assert len(silent.asked) < 50
    assert waits.now() == pytest.approx(PATIENCE.total_seconds(), abs=30)
    assert fold(read_journal(run)[0]).open_intent is not None


def test_where_there_is_no_scontrol_a_successor_is_submitted_at_once(run: RunDirectory) -> None:
    slurm, waits = ScriptedSlurm([RequeueAnswer.NO_COMMAND]), Waits()
    assert climb(run, slurm, waits=waits).outcome is RequeueOutcome.SUCCESSOR
    assert slurm.asked == ["requeue 42", SUCCESSOR]
    assert waits == []


def test_a_node_that_can_not_start_scontrol_for_a_moment_asks_again(run: RunDirectory) -> None:
    asked: list[str] = []

    def full(argv: Sequence[str], timeout: timedelta, environment: Mapping[str, str]) -> Completed:
        if argv[1] == "requeue":
            asked.append(" ".join(argv))
            if len(asked) < 3:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return Completed(tuple(argv), 0, "", "")

    slurm = SubprocessSlurm(environment={}, runner=full)
    assert climb(run, slurm).outcome is RequeueOutcome.REQUEUED
    assert asked == ["scontrol requeue 42"] * 3


def test_a_run_that_is_held_waits_in_the_queue_with_the_reason_beside_it(
    run: RunDirectory,
) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED])
    assert climb(run, slurm, hold="app_error: the same\nerror twice").outcome is RequeueOutcome.HELD
    assert slurm.asked == [
        "update 42 Comment=slurm_forge: app_error: the same error twice",
        "requeuehold 42",
    ]
    held = fold(read_journal(run)[0]).held
    assert held is not None and (held.job, held.restart_count) == ("42", 3)
    assert held.confirmed


def test_a_job_that_was_requeued_meanwhile_is_held_all_the_same(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.ALREADY_PENDING])
    assert climb(run, slurm, hold="why").outcome is RequeueOutcome.HELD
    assert slurm.asked[1:] == ["requeuehold 42", "hold 42"]


def test_a_hold_whose_answer_was_lost_is_a_hold(run: RunDirectory) -> None:
    """Else whoever releases the job would find that its start does nothing."""
    waits = JobRecord(
        job_id=42, name="x", state=JobState.PENDING, state_text="PENDING", restarts=4, priority=0
    )
    slurm = ScriptedSlurm([RequeueAnswer.UNREACHABLE], job=waits)
    assert climb(run, slurm, hold="why").outcome is RequeueOutcome.HELD
    assert slurm.asked[1:] == ["requeuehold 42", "hold 42"]
    held = fold(read_journal(run)[0]).held
    assert held is not None and held.confirmed


def test_a_job_that_can_not_be_held_does_not_count_as_held(run: RunDirectory) -> None:
    """It starts again, and that start must not be taken for somebody's release."""

    class Stubborn(ScriptedSlurm):
        def hold(self, job: str) -> None:
            super().hold(job)
            raise SlurmCommandError(["scontrol"], 1, "no")

    slurm = Stubborn([RequeueAnswer.ALREADY_PENDING])
    assert climb(run, slurm, hold="why").outcome is RequeueOutcome.HELD_IN_JOURNAL
    assert fold(read_journal(run)[0]).held is None


def test_a_job_that_is_cancelled_while_slurm_is_waited_for_stays_cancelled(
    run: RunDirectory,
) -> None:
    running = replace(ENDING, state=JobState.RUNNING)
    for before, explain in (
        (None, None),
        (running, Explains(Cause.CRASH, running)),
        (SILENT, Explains(Cause.USER_CANCELLED)),
        (ENDING, Explains(Cause.USER_CANCELLED, running)),
    ):
        slurm = EndsMeanwhile([RequeueAnswer.UNREACHABLE, RequeueAnswer.REQUEUED], before)
        assert climb(run, slurm, explain=explain).outcome is RequeueOutcome.CANCELLED
        assert slurm.asked == ["requeue 42"]
    over = replace(ENDING, state=JobState.CANCELLED)
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED], job=over)
    assert climb(run, slurm).outcome is RequeueOutcome.CANCELLED
    assert slurm.asked == []


@pytest.mark.parametrize("lost", [RequeueAnswer.UNREACHABLE, RequeueAnswer.TRY_AGAIN])
@pytest.mark.parametrize(
    ("before", "explain"),
    [
        (ENDING, None),
        (ENDING, Explains(Cause.TIME_LIMIT)),
        (SILENT, Explains(Cause.TIME_LIMIT, ENDING)),
        # By what slurmstepd has printed.
        (SILENT, Explains(Cause.TIME_LIMIT)),
    ],
)
def test_a_job_that_slurm_was_ending_anyway_is_not_taken_for_a_cancelled_one(
    run: RunDirectory,
    before: JobRecord | SlurmCommandError,
    explain: StopExplainer | None,
    lost: RequeueAnswer,
) -> None:
    """By a limit that its record does not tell of: GrpWall, a deadline, a reservation's end."""
    slurm = EndsMeanwhile([lost, RequeueAnswer.REQUEUED], before)
    assert climb(run, slurm, explain=explain).outcome is RequeueOutcome.REQUEUED
    assert slurm.asked == ["requeue 42"] * 2
    assert fold(read_journal(run)[0]).status is RunStatus.REQUEUED


def test_an_end_that_slurm_explains_while_it_is_waited_for_is_no_cancellation(
    run: RunDirectory,
) -> None:
    explain = Explains(Cause.TIME_LIMIT)

    class EndsTheJob(EndsMeanwhile):
        """And signals the batch step."""

        def requeue(self, job: str) -> RequeueReply:
            explain.is_open = not self.asked
            return super().requeue(job)

        def show_job(self, job: str) -> JobRecord | None:
            found = super().show_job(job)
            explain.is_open = False
            return found

    running = replace(ENDING, state=JobState.RUNNING)
    slurm = EndsTheJob([RequeueAnswer.UNREACHABLE, RequeueAnswer.REQUEUED], running)
    assert climb(run, slurm, explain=explain).outcome is RequeueOutcome.REQUEUED


def test_a_hold_of_a_job_that_slurm_was_ending_anyway_is_a_hold(run: RunDirectory) -> None:
    slurm = EndsMeanwhile([RequeueAnswer.UNREACHABLE, RequeueAnswer.REQUEUED], SILENT)
    explain = Explains(Cause.TIME_LIMIT, ENDING)
    assert climb(run, slurm, hold="why", explain=explain).outcome is RequeueOutcome.HELD


def test_a_hold_waits_for_what_the_job_is_ended_for(run: RunDirectory) -> None:
    """The same request would put a job that somebody has cancelled back into the queue."""
    waits = Waits()
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED], job=SILENT)
    explain = Explains(Cause.USER_CANCELLED, is_open=True)
    assert (
        climb(run, slurm, hold="why", waits=waits, explain=explain).outcome
        is RequeueOutcome.HELD_IN_JOURNAL
    )
    assert slurm.asked == []
    assert waits.now() == pytest.approx(PATIENCE.total_seconds(), abs=30)
    state = fold(read_journal(run)[0])
    assert (state.status, state.reason, state.held) == (RunStatus.HELD, "why", None)


def test_the_new_start_of_a_job_is_not_changed(run: RunDirectory) -> None:
    """NumNodes would take nodes away from it."""
    begun = JobRecord(job_id=42, name="x", state=JobState.RUNNING, state_text="R", restarts=4)
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED], job=begun)
    assert climb(run, slurm, update=JobUpdate(num_nodes=1)).outcome is RequeueOutcome.REQUEUED
    assert slurm.asked == []


def test_a_storage_that_fails_does_not_keep_slurm_from_being_asked(run: RunDirectory) -> None:
    def stale() -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED])
    job_requeuer = JobRequeuer(
        slurm,  # type: ignore[arg-type]
        job="42",
        script=None,
        journal=JournalWriter(run, attempt=claim(run), writer="supervisor"),
        fence=stale,
    )
    assert job_requeuer.requeue("storage").outcome is RequeueOutcome.REQUEUED


def test_a_successor_that_waits_already_is_not_made_twice(run: RunDirectory) -> None:
    waits = JobRecord(job_id=77, name="x", state=JobState.PENDING, state_text="PENDING")

    class Knows(ScriptedSlurm):
        def show_job(self, job: str) -> JobRecord | None:
            return waits if job == "77" else None

    slurm = Knows([RequeueAnswer.DISABLED])
    job_requeuer = JobRequeuer(
        slurm,  # type: ignore[arg-type]
        job="42",
        script=Path("job.sbatch"),
        successor="77",
        journal=JournalWriter(run, attempt=claim(run), writer="supervisor"),
        fence=lambda: None,
    )
    assert job_requeuer.requeue("preempted").outcome is RequeueOutcome.SUCCESSOR
    assert slurm.asked == ["requeue 42"]
    assert fold(read_journal(run)[0]).job == "77"


def test_that_it_is_held_is_on_disk_before_slurm_ends_us(run: RunDirectory) -> None:
    seen: list[bool] = []

    class Looking(ScriptedSlurm):
        def requeue_hold(self, job: str) -> RequeueReply:
            seen.append(fold(read_journal(run)[0]).held is not None)
            return super().requeue_hold(job)

    climb(run, Looking([RequeueAnswer.REQUEUED]), hold="why")
    assert seen == [True]


@pytest.mark.parametrize("reply", [RequeueAnswer.DISABLED, RequeueAnswer.NO_COMMAND])
def test_where_slurm_does_not_hold_it_the_run_rests_out_of_the_queue(
    run: RunDirectory, reply: RequeueAnswer
) -> None:
    slurm = ScriptedSlurm([reply])
    assert climb(run, slurm, hold="why").outcome is RequeueOutcome.HELD_IN_JOURNAL
    assert slurm.asked[1:] == ["requeuehold 42"], "a held run is not submitted again"
    assert fold(read_journal(run)[0]).held is None


def test_a_start_that_is_to_wait_waits_in_the_queue(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED])
    climb(run, slurm, wait=timedelta(minutes=4))
    assert slurm.asked[-1] == "update 42 StartTime=now+240"
    slurm = ScriptedSlurm([RequeueAnswer.DISABLED])
    climb(run, slurm, wait=timedelta(minutes=4), arguments=("--mem=9M",))
    assert slurm.asked[-1] == (
        "sbatch --dependency=afterany:42 --begin=now+240 --mem=9M job.sbatch"
    )


@pytest.mark.parametrize("reply", [RequeueAnswer.DISABLED, RequeueAnswer.REFUSED])
def test_where_requeue_cannot_work_a_successor_waits_for_our_end(
    run: RunDirectory, reply: RequeueAnswer
) -> None:
    slurm = ScriptedSlurm([reply])
    assert climb(run, slurm).outcome is RequeueOutcome.SUCCESSOR
    assert slurm.asked == ["requeue 42", SUCCESSOR]
    state = fold(read_journal(run)[0])
    assert (state.status, state.job) == (RunStatus.REQUEUED, "77")


@pytest.mark.parametrize(
    "error",
    [
        SlurmUnreachableError(["sbatch"], 1, "Unable to contact slurm controller"),
        SlurmUnreachableError(["sbatch"], 124, "no answer within 120 s"),
        SlurmCommandError(["sbatch"], 1, "QOSMaxSubmitJobPerUserLimit"),
    ],
)
def test_no_successor_either_leaves_the_intent_open(
    run: RunDirectory, error: SlurmCommandError
) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.DISABLED], submit_error=error)
    assert climb(run, slurm).outcome is RequeueOutcome.PENDING
    assert fold(read_journal(run)[0]).open_intent is not None


def test_without_a_script_there_is_nothing_to_submit(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.DISABLED])
    assert climb(run, slurm, script=None).outcome is RequeueOutcome.PENDING
    assert slurm.asked == ["requeue 42"]


def test_a_fenced_attempt_asks_slurm_for_nothing(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED])
    attempt = claim(run)
    claim(run)
    journal = JournalWriter(run, attempt=attempt, writer="supervisor")
    job_requeuer = JobRequeuer(
        slurm,  # type: ignore[arg-type]
        job="42",
        script=None,
        journal=journal,
        fence=Fence(run, attempt),
    )
    with pytest.raises(FencedError):
        job_requeuer.requeue("preempted")
    assert slurm.asked == [] and told(run) == []


def test_changed_resources_go_to_the_waiting_job(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED])
    climb(run, slurm, update=JobUpdate(exclude_nodes=("n3",)))
    assert slurm.asked[-1] == "update 42 ExcNodeList=n3"


def test_a_refused_change_does_not_undo_the_requeue(run: RunDirectory) -> None:
    slurm = ScriptedSlurm(
        [RequeueAnswer.REQUEUED], update_error=SlurmCommandError(["scontrol"], 1, "no")
    )
    assert (
        climb(run, slurm, update=JobUpdate(exclude_nodes=("n3",))).outcome
        is RequeueOutcome.REQUEUED
    )
    assert fold(read_journal(run)[0]).status is RunStatus.REQUEUED


def test_a_node_that_is_gone_does_not_cost_the_other_changes(run: RunDirectory) -> None:
    slurm = ScriptedSlurm(
        [RequeueAnswer.REQUEUED],
        update_error=SlurmCommandError(["scontrol"], 1, "Invalid node name specified"),
    )
    climb(run, slurm, update=JobUpdate(exclude_nodes=("n3",), memory_per_node=1 << 30))
    assert slurm.asked[-2:] == [
        "update 42 ExcNodeList=n3 MinMemoryNode=1024",
        "update 42 MinMemoryNode=1024",
    ]


def test_a_successor_gets_the_changed_resources_too(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.DISABLED])
    climb(run, slurm, update=JobUpdate(exclude_nodes=("n3",)))
    assert slurm.asked[-1] == "update 77 ExcNodeList=n3"


def test_that_it_is_queued_is_written_before_anything_else_is_asked(run: RunDirectory) -> None:
    """The requeue ends us: what comes after it may never happen."""
    seen: list[list[str]] = []

    class Looking(ScriptedSlurm):
        def update_job(self, job: str, update: JobUpdate) -> None:
            seen.append(told(run))

    climb(run, Looking([RequeueAnswer.REQUEUED]), update=JobUpdate(exclude_nodes=("n3",)))
    assert seen == [["requeue_intended", "requeue_done"]]


def test_a_full_disk_does_not_prevent_the_requeue(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = claim(run)

    def full(file: AppendFile, line: bytes, sync: bool = False) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(AppendFile, "append", full)
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED])
    job_requeuer = JobRequeuer(
        slurm,  # type: ignore[arg-type]
        job="42",
        script=None,
        journal=JournalWriter(run, attempt=attempt, writer="supervisor"),
        fence=Fence(run, attempt),
    )
    assert job_requeuer.requeue("preempted").outcome is RequeueOutcome.REQUEUED
    assert slurm.asked == ["requeue 42"]


def soon_requeuer(run: RunDirectory, slurm: ScriptedSlurm, waits: Waits) -> JobRequeuer:
    attempt = claim(run)
    journal = JournalWriter(run, attempt=attempt, writer="supervisor")
    journal.write(AttemptStarted(job="42", restart_count=0, nodes=("n1",), host="n1", via="sbatch"))
    return JobRequeuer(
        slurm,  # type: ignore[arg-type]
        job="42",
        script=None,
        journal=journal,
        fence=Fence(run, attempt),
        restart_count=3,
        sleep=waits.append,
        clock=waits.now,
    )


def test_a_requeued_job_is_to_start_soon_and_sooner_once_we_are_gone(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED])
    job_requeuer = soon_requeuer(run, slurm, Waits())
    job_requeuer.requeue("preempted", soon=lambda: timedelta(seconds=43))
    job_requeuer.start_soon(timedelta(seconds=3))
    assert slurm.asked == [
        "requeue 42",
        "update 42 StartTime=now+43",
        "update 42 StartTime=now+3",
    ]


def test_how_long_ago_it_was_requeued(run: RunDirectory) -> None:
    waits = Waits()
    job_requeuer = soon_requeuer(run, ScriptedSlurm([RequeueAnswer.REQUEUED]), waits)
    assert job_requeuer.requeued_ago == timedelta(0)
    job_requeuer.requeue("preempted", soon=lambda: timedelta(seconds=43))
    waits.append(12)
    assert job_requeuer.requeued_ago == timedelta(seconds=12)


def test_a_pause_that_was_decided_on_holds(run: RunDirectory) -> None:
    waits = Waits()
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED])
    job_requeuer = soon_requeuer(run, slurm, waits)
    job_requeuer.requeue("io", wait=timedelta(seconds=300), soon=lambda: timedelta(seconds=43))
    waits.append(20)
    job_requeuer.start_soon(timedelta(seconds=3))
    assert slurm.asked == [
        "requeue 42",
        "update 42 StartTime=now+300",
        "update 42 StartTime=now+280",
    ]


def test_where_slurms_delay_is_kept_or_the_job_is_not_ours_nothing_is_asked(
    run: RunDirectory,
) -> None:
    slurm = ScriptedSlurm([RequeueAnswer.REQUEUED])
    job_requeuer = soon_requeuer(run, slurm, Waits())
    job_requeuer.requeue("preempted", soon=lambda: None)
    job_requeuer.start_soon(timedelta(seconds=3))
    assert slurm.asked == ["requeue 42"]
    denied = ScriptedSlurm([RequeueAnswer.DENIED])
    other = soon_requeuer(run, denied, Waits())
    other.requeue("preempted", soon=lambda: timedelta(seconds=43))
    other.start_soon(timedelta(seconds=3))
    assert denied.asked == ["requeue 42"]


def test_a_site_that_refuses_a_begin_time_costs_nothing_else(run: RunDirectory) -> None:
    class Refuses(ScriptedSlurm):
        def update_job(self, job: str, update: JobUpdate) -> None:
            super().update_job(job, update)
            if update.start_after is not None:
                raise SlurmCommandError(["scontrol"], 1, "Access/permission denied")

    slurm = Refuses([RequeueAnswer.REQUEUED])
    job_requeuer = soon_requeuer(run, slurm, Waits())
    done = job_requeuer.requeue(
        "oom",
        JobUpdate(memory_per_node=1 << 30),
        soon=lambda: timedelta(seconds=43),
    )
    job_requeuer.start_soon(timedelta(seconds=3))
    assert done.outcome is RequeueOutcome.REQUEUED
    assert "update 42 MinMemoryNode=1024" in slurm.asked
    assert told(run) == ["requeue_intended", "requeue_done"]
