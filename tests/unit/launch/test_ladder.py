"""The requeue ladder against a Slurm that answers as it is told to."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurm_forge.errors import FencedError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.files import AppendFile
from slurm_forge.journal import JournalWriter, RunStatus, fold, read_journal
from slurm_forge.journal.events import AttemptStarted, RequeueDone, RequeueFailed, RequeueIntended
from slurm_forge.launch.ladder import Comeback, Ladder, Taken
from slurm_forge.run_directory import Fence, RunDirectory, claim_attempt
from slurm_forge.slurm.answers import RequeueOutcome, RequeueReply
from slurm_forge.slurm.client import JobUpdate


@dataclass
class ScriptedSlurm:
    """Answers requeues in turn (the last for ever); remembers what it was asked."""

    replies: list[RequeueOutcome]
    submit_error: SlurmCommandError | None = None
    update_error: SlurmCommandError | None = None
    asked: list[str] = field(default_factory=list)

    def requeue(self, job: str) -> RequeueReply:
        self.asked.append(f"requeue {job}")
        outcome = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return RequeueReply(outcome, f"slurm says {outcome.value}")

    def submit(self, script: Path, args: Sequence[str] = ()) -> str:
        self.asked.append(f"sbatch {' '.join(args)} {script.name}")
        if self.submit_error is not None:
            raise self.submit_error
        return "77"

    def update_job(self, job: str, update: JobUpdate) -> None:
        self.asked.append(f"update {job} {' '.join(update.assignments())}")
        if self.update_error is not None:
            raise self.update_error


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
    slurm: ScriptedSlurm,
    *,
    script: Path | None = Path("job.sbatch"),
    update: JobUpdate | None = None,
    waits: list[float] | None = None,
) -> Comeback:
    attempt = claim(run)
    journal = JournalWriter(run, attempt=attempt, writer="supervisor")
    journal.write(AttemptStarted(job="42", restart_count=0, nodes=("n1",), host="n1", via="sbatch"))
    ladder = Ladder(
        slurm,  # type: ignore[arg-type]
        job="42",
        script=script,
        journal=journal,
        fence=Fence(run, attempt),
        sleep=([] if waits is None else waits).append,
    )
    return ladder.climb("preempted", update)


def told(run: RunDirectory) -> list[str]:
    kinds = (RequeueIntended, RequeueDone, RequeueFailed)
    records = [r for r in read_journal(run)[0] if isinstance(r.event, kinds)]
    return [r.event.kind for r in sorted(records, key=lambda r: r.sequence)]


@pytest.mark.parametrize("reply", [RequeueOutcome.REQUEUED, RequeueOutcome.ALREADY_PENDING])
def test_in_the_queue_is_in_the_queue(run: RunDirectory, reply: RequeueOutcome) -> None:
    slurm = ScriptedSlurm([reply])
    assert climb(run, slurm).taken is Taken.REQUEUED
    assert slurm.asked == ["requeue 42"]
    assert told(run) == ["requeue_intended", "requeue_done"]
    state = fold(read_journal(run)[0])
    assert (state.status, state.open_intent, state.job) == (RunStatus.REQUEUED, None, "42")


def test_the_intent_is_on_disk_before_slurm_is_asked(run: RunDirectory) -> None:
    seen: list[list[str]] = []

    class Looking(ScriptedSlurm):
        def requeue(self, job: str) -> RequeueReply:
            seen.append(told(run))
            return super().requeue(job)

    climb(run, Looking([RequeueOutcome.REQUEUED]))
    assert seen == [["requeue_intended"]]


def test_a_busy_controller_is_asked_again_and_not_for_ever(run: RunDirectory) -> None:
    waits: list[float] = []
    slurm = ScriptedSlurm([RequeueOutcome.TRY_AGAIN, RequeueOutcome.REQUEUED])
    assert climb(run, slurm, waits=waits).taken is Taken.REQUEUED
    assert len(waits) == 1
    silent = ScriptedSlurm([RequeueOutcome.UNREACHABLE])
    assert climb(run, silent).taken is Taken.OPEN
    assert len(silent.asked) <= 5
    assert fold(read_journal(run)[0]).open_intent is not None


@pytest.mark.parametrize("reply", [RequeueOutcome.DISABLED, RequeueOutcome.REFUSED])
def test_where_requeue_cannot_work_a_successor_waits_for_our_end(
    run: RunDirectory, reply: RequeueOutcome
) -> None:
    slurm = ScriptedSlurm([reply])
    assert climb(run, slurm).taken is Taken.SUCCESSOR
    assert slurm.asked == ["requeue 42", "sbatch --dependency=afterany:42 job.sbatch"]
    state = fold(read_journal(run)[0])
    assert (state.status, state.job) == (RunStatus.REQUEUED, "77")


@pytest.mark.parametrize(
    "error",
    [
        SlurmUnreachableError(["sbatch"], 1, "no controller"),
        SlurmCommandError(["sbatch"], 1, "QOSMaxSubmitJobPerUserLimit"),
    ],
)
def test_no_successor_either_leaves_the_intent_open(
    run: RunDirectory, error: SlurmCommandError
) -> None:
    slurm = ScriptedSlurm([RequeueOutcome.DISABLED], submit_error=error)
    assert climb(run, slurm).taken is Taken.OPEN
    assert fold(read_journal(run)[0]).open_intent is not None


def test_without_a_script_there_is_nothing_to_submit(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueOutcome.DISABLED])
    assert climb(run, slurm, script=None).taken is Taken.OPEN
    assert slurm.asked == ["requeue 42"]


def test_a_fenced_attempt_asks_slurm_for_nothing(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueOutcome.REQUEUED])
    attempt = claim(run)
    claim(run)
    journal = JournalWriter(run, attempt=attempt, writer="supervisor")
    ladder = Ladder(
        slurm,  # type: ignore[arg-type]
        job="42",
        script=None,
        journal=journal,
        fence=Fence(run, attempt),
    )
    with pytest.raises(FencedError):
        ladder.climb("preempted")
    assert slurm.asked == [] and told(run) == []


def test_changed_resources_go_to_the_waiting_job(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueOutcome.REQUEUED])
    climb(run, slurm, update=JobUpdate(exclude_nodes=("n3",)))
    assert slurm.asked[-1] == "update 42 ExcNodeList=n3"


def test_a_refused_change_does_not_undo_the_requeue(run: RunDirectory) -> None:
    slurm = ScriptedSlurm(
        [RequeueOutcome.REQUEUED], update_error=SlurmCommandError(["scontrol"], 1, "no")
    )
    assert climb(run, slurm, update=JobUpdate(exclude_nodes=("n3",))).taken is Taken.REQUEUED
    assert fold(read_journal(run)[0]).status is RunStatus.REQUEUED


def test_a_successor_gets_the_changed_resources_too(run: RunDirectory) -> None:
    slurm = ScriptedSlurm([RequeueOutcome.DISABLED])
    climb(run, slurm, update=JobUpdate(exclude_nodes=("n3",)))
    assert slurm.asked[-1] == "update 77 ExcNodeList=n3"


def test_that_it_is_queued_is_written_before_anything_else_is_asked(run: RunDirectory) -> None:
    """The requeue ends us: what comes after it may never happen."""
    seen: list[list[str]] = []

    class Looking(ScriptedSlurm):
        def update_job(self, job: str, update: JobUpdate) -> None:
            seen.append(told(run))

    climb(run, Looking([RequeueOutcome.REQUEUED]), update=JobUpdate(exclude_nodes=("n3",)))
    assert seen == [["requeue_intended", "requeue_done"]]


def test_a_full_disk_does_not_prevent_the_requeue(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = claim(run)

    def full(file: AppendFile, line: bytes, sync: bool = False) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(AppendFile, "append", full)
    slurm = ScriptedSlurm([RequeueOutcome.REQUEUED])
    ladder = Ladder(
        slurm,  # type: ignore[arg-type]
        job="42",
        script=None,
        journal=JournalWriter(run, attempt=attempt, writer="supervisor"),
        fence=Fence(run, attempt),
    )
    assert ladder.climb("preempted").taken is Taken.REQUEUED
    assert slurm.asked == ["requeue 42"]
