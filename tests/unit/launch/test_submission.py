"""A person lets a run go on, or carries out what was left open: once, whoever asks how often."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from slurm_forge.errors import (
    ConfigError,
    RunDirectoryError,
    SlurmCommandError,
    SlurmUnreachableError,
)
from slurm_forge.journal import JournalWriter, RunStatus, read_journal
from slurm_forge.journal.events import (
    AttemptEnded,
    AttemptStarted,
    DecisionTaken,
    Event,
    Held,
    IncidentSeen,
    RequeueIntended,
    UserAsked,
)
from slurm_forge.launch.attempt.attempt import (
    StartRefusal,
    begin,
)
from slurm_forge.launch.render.sbatch_options import leave_out
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.requeue import reconcile as asked_back
from slurm_forge.launch.requeue.job_update import ResourceChanges
from slurm_forge.launch.requeue.reconcile import (
    ReconcileResult,
    bring_back,
    reconcile,
)
from slurm_forge.launch.submit.submission import (
    create_run,
    job_script,
    keep_payload,
    keep_successor,
    note_asked,
    payload,
    run_state,
    submit_script,
)
from slurm_forge.run_directory import RunDirectory, claim_attempt
from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.records import AccountingRecord, JobRecord, PartitionRecord, QueueRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import (
    RequeueAnswer,
    RequeueReply,
)
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Change, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan

SITE = find_site("generic")


@dataclass
class Queue:
    """A Slurm with a queue: what is submitted waits, what is released is released."""

    run: RunDirectory
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    denied: bool = False
    refuses: bool = False
    nodes: str = "n[1-16]"
    #: How the run is at the moment of the release: what a start would find.
    found: list[RunStatus] = field(default_factory=list)
    #: The last state of a job in accounting, None where that does not know it.
    accounted: JobState | None = None
    ended: datetime | None = None

    def accounting(self, job: str) -> tuple[AccountingRecord, ...]:
        if self.accounted is None:
            return ()
        text = self.accounted.value
        return (
            AccountingRecord(
                job_ref=job,
                step=None,
                job_id=int(job),
                state=self.accounted,
                state_text=text,
                end_time=self.ended,
            ),
        )

    def put(self, job: int, state: JobState, **more: object) -> None:
        self.jobs[str(job)] = JobRecord(
            job_id=job,
            name="r",
            state=state,
            state_text=state.value,
            **more,  # type: ignore[arg-type]
        )

    def show_job(self, job: str) -> JobRecord | None:
        return self.jobs.get(job)

    def show_partition(self, name: str) -> PartitionRecord | None:
        return PartitionRecord(name=name, nodes=self.nodes)

    def show_partitions(self) -> tuple[PartitionRecord, ...]:
        return (PartitionRecord(name="long", nodes=self.nodes, is_default=True),)

    def update_job(self, job: str, update: JobUpdate) -> None:
        self.asked.append(" ".join(["update", job, *update.assignments()]))
        if self.refuses:
            raise SlurmCommandError(("scontrol",), 1, "Invalid node name specified")

    def queue(self, user: str) -> tuple[QueueRecord, ...]:
        return tuple(
            QueueRecord(
                job_ref=job,
                job_id=record.job_id,
                state=record.state,
                reason=None,
            )
            for job, record in self.jobs.items()
        )

    def submit(self, script: Path, args: Sequence[str] = ()) -> str:
        self.asked.append(" ".join(["sbatch", *args, script.name]))
        job = 100 + len(self.jobs)
        self.put(job, JobState.PENDING, command=str(script))
        return str(job)

    def release(self, job: str) -> None:
        self.asked.append(f"release {job}")
        self.found.append(run_state(self.run).status)
        if self.denied:
            error = SlurmCommandError(("scontrol",), 1, "Access/permission denied for job 7")
            raise error

    def requeue(self, job: str) -> RequeueReply:
        self.asked.append(f"requeue {job}")
        if job in self.jobs:
            self.put(int(job), JobState.PENDING)
            return RequeueReply(RequeueAnswer.REQUEUED, "")
        return RequeueReply(RequeueAnswer.UNKNOWN_JOB, "Invalid job id specified")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    job = job_from_mapping(
        {"name": "r", "entry": "a:b", "resources": {"exclude": "n[1-2]", "nodelist": None}}
    )
    return create_run(job, runs=tmp_path, site=SITE, submitted_from=tmp_path)[0]


@pytest.fixture
def queue(run: RunDirectory) -> Queue:
    return Queue(run)


def attempted(run: RunDirectory, *events: Event, restart_count: int = 0) -> None:
    """An attempt of job 7 that left these events."""
    claim = claim_attempt(
        run, job="7", restart_count=restart_count, host="n1", pid=1, nodes=("n1",), time=1.0
    )
    journal = JournalWriter(run, attempt=claim.attempt, writer="supervisor", clock=lambda: 1.0)
    journal.write(
        AttemptStarted(job="7", restart_count=restart_count, nodes=("n1",), host="n1", via="sbatch")
    )
    for event in events:
        journal.write(event)
    journal.close()


def held(run: RunDirectory, *, in_queue: bool = True, plan: RecoveryPlan | None = None) -> None:
    decision = Decision(
        action=Action.HOLD,
        cause=Cause.APP_ERROR,
        incident_id="1.1.1",
        reason="it failed again",
        plan=plan or RecoveryPlan(),
    )
    queued = [Held(job="7", restart_count=0, reason="it failed again")] if in_queue else []
    attempted(run, DecisionTaken(decision=decision), *queued, AttemptEnded(outcome="held"))
    assert run_state(run).status is RunStatus.HELD


def back(run: RunDirectory, queue: Queue, **more: object) -> ReconcileResult:
    file = read_run_file(run.spec_file)
    return bring_back(run, queue, site=SITE, file=file, **more)  # type: ignore[arg-type]


# -- requeue --------------------------------------------------------------------------------------


@pytest.mark.parametrize("before_s, goes_on", [(30.0, False), (-30.0, True)])
def test_a_job_of_a_chain_wakes_no_run_at_rest_and_a_new_one_does(
    run: RunDirectory, queue: Queue, before_s: float, goes_on: bool
) -> None:
    """By Slurm's own times: the node that wrote the journal may be an hour behind."""
    held(run)
    ended = datetime.fromtimestamp(3600.0, tz=timezone.utc)
    queue.accounted, queue.ended = JobState.FAILED, ended
    queue.put(8, JobState.RUNNING, submit_time=ended - timedelta(seconds=before_s))
    note_asked(run, "8", 0, queue)  # type: ignore[arg-type]
    assert (run_state(run).status is RunStatus.SUBMITTED) is goes_on
    assert run_state(run).status.is_at_rest is not goes_on


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.REQUEUE_HOLD, JobState.COMPLETING])
def test_a_held_job_is_released_and_its_start_goes_on(
    run: RunDirectory, queue: Queue, state: JobState
) -> None:
    held(run)
    queue.put(7, state, priority=0, reason="job_requeued_in_held_state")
    assert back(run, queue) == ReconcileResult("7", "released job 7, which was held", changed=True)
    assert queue.asked == ["release 7"]
    assert queue.found == [RunStatus.SUBMITTED], "a start at once would have found it at rest"


def test_only_an_administrator_releases_what_one_holds(run: RunDirectory, queue: Queue) -> None:
    held(run)
    queue.put(7, JobState.PENDING, priority=0, reason="JobHeldAdmin")
    queue.denied = True
    with pytest.raises(RunDirectoryError, match=r"administrator holds\n.*ask them about job 7"):
        back(run, queue)


def test_a_held_run_that_left_the_queue_is_submitted_again(run: RunDirectory, queue: Queue) -> None:
    held(run, in_queue=False)
    queue.put(7, JobState.COMPLETED)
    run.stop_file.touch()
    assert back(run, queue, exclude=("n5", "n1")).changed
    assert queue.asked == ["sbatch --exclude=n[1-2,5] job.sbatch"]
    assert not run.stop_file.exists()
    assert run_state(run).status is RunStatus.SUBMITTED


def test_what_recovery_has_changed_stays_changed(run: RunDirectory, queue: Queue) -> None:
    held(run, in_queue=False, plan=RecoveryPlan(exclude_nodes=("n7",), mem_factor=1.5))
    queue.put(7, JobState.COMPLETED, memory_per_node=3 << 30)
    back(run, queue)
    assert queue.asked == ["sbatch --exclude=n[1-2,7] --mem=3072M job.sbatch"]


def test_a_run_whose_job_is_still_ending_follows_it(run: RunDirectory, queue: Queue) -> None:
    held(run, in_queue=False)
    queue.put(7, JobState.COMPLETING, priority=100)
    assert back(run, queue).changed
    assert queue.asked == ["sbatch --dependency=afterany:7 job.sbatch"]


def test_a_stop_that_a_waiting_job_would_obey_is_taken_back(
    run: RunDirectory, queue: Queue
) -> None:
    attempted(run)
    queue.put(7, JobState.PENDING, priority=100)
    run.stop_file.touch()
    assert back(run, queue).changed
    assert queue.asked == []
    assert not run.stop_file.exists()
    started = begin(run, job="7", restart_count=1, nodes=("n1",), via="sbatch")
    assert not isinstance(started, StartRefusal)


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING, JobState.COMPLETING])
def test_what_goes_on_anyway_is_left_alone(
    run: RunDirectory, queue: Queue, state: JobState
) -> None:
    attempted(run)
    queue.put(7, state, priority=100)
    how = f"{state.value} already"
    if state is JobState.COMPLETING:
        how = "ending: try again in a moment"
    assert back(run, queue) == ReconcileResult("7", f"job 7 is {how}", changed=False)
    assert queue.asked == []


def test_no_second_job_is_made_beside_one_in_a_state_that_is_not_known_here(
    run: RunDirectory, queue: Queue
) -> None:
    attempted(run)
    queue.jobs["7"] = JobRecord(job_id=7, name="r", state=JobState.UNKNOWN, state_text="MIGRATING")
    answer = ReconcileResult("7", "job 7 is MIGRATING: try again in a moment", changed=False)
    assert back(run, queue) == answer
    assert back(run, queue, changes=ResourceChanges(mem="8G")) == answer
    assert queue.asked == []


def test_a_successor_in_a_state_that_is_not_known_here_is_found(
    run: RunDirectory, queue: Queue
) -> None:
    attempted(run)
    queue.put(7, JobState.COMPLETED)
    queue.put(55, JobState.UNKNOWN, command=str(job_script(run)))
    assert back(run, queue) == ReconcileResult(
        "55", "job 55 is ?: try again in a moment", changed=False
    )
    assert queue.asked == []


def test_two_people_at_once_make_one_job(run: RunDirectory, queue: Queue) -> None:
    held(run, in_queue=False)
    barrier = threading.Barrier(4)
    brought: list[ReconcileResult] = []

    def ask() -> None:
        barrier.wait()
        brought.append(back(run, queue))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(queue.asked) == 1
    assert [each.changed for each in brought].count(True) == 1
    assert {each.job for each in brought} == {"100"}


def test_a_job_that_another_host_has_made_is_found(run: RunDirectory, queue: Queue) -> None:
    """Its answer may have been lost, or the journal not have reached us yet."""
    held(run, in_queue=False)
    queue.put(55, JobState.PENDING, command=str(job_script(run)), priority=100)
    assert back(run, queue).job == "55"
    assert not [word for word in queue.asked if word.startswith("sbatch")]


def test_a_run_of_submitit_goes_on_by_submitit_s_payload(run: RunDirectory, queue: Queue) -> None:
    held(run, in_queue=False)
    keep_payload(run, lambda path: path.write_bytes(b"pickle"))
    assert payload(run).read_bytes() == b"pickle"
    keep_successor(run, "#!/bin/bash\n#SBATCH --exclude='n[1-3]'\npayload\n")
    assert back(run, queue, exclude=["n9"]).changed
    assert queue.asked == ["sbatch --exclude=n[1-3,9] job.sbatch"]
    assert "payload" in job_script(run).read_text()
    submit_script(run, read_run_file(run.spec_file), SITE, queue)  # type: ignore[arg-type]
    assert "payload" not in job_script(run).read_text()


# -- reconcile ------------------------------------------------------------------------------------


def open_intent(run: RunDirectory, *, restart_count: int = 0) -> None:
    intent = RequeueIntended(job="7", method="scontrol requeue", reason="preempted")
    attempted(run, intent, AttemptEnded(outcome="open"), restart_count=restart_count)
    assert run_state(run).open_intent is not None


def test_an_open_intent_is_carried_out_once(run: RunDirectory, queue: Queue) -> None:
    open_intent(run)
    queue.put(7, JobState.PREEMPTED)
    assert reconcile(run, queue).changed  # type: ignore[arg-type]
    again = reconcile(run, queue)  # type: ignore[arg-type]
    assert (again.text, again.changed) == ("nothing is open", False)
    assert queue.asked == ["requeue 7"]


def test_a_forgotten_job_gets_one_successor(run: RunDirectory, queue: Queue) -> None:
    open_intent(run)
    keep_successor(run, "#!/bin/bash\n")
    brought = reconcile(run, queue)  # type: ignore[arg-type]
    assert (brought.job, brought.changed) == ("100", True)
    assert [word for word in queue.asked if word.startswith("sbatch")] == [
        "sbatch --dependency=afterany:7 --begin=now job.sbatch"
    ]
    assert not reconcile(run, queue).changed  # type: ignore[arg-type]


def test_a_successor_whose_answer_was_lost_is_not_made_twice(
    run: RunDirectory, queue: Queue
) -> None:
    open_intent(run)
    keep_successor(run, "#!/bin/bash\n")
    queue.put(55, JobState.PENDING, command=str(job_script(run)))
    brought = reconcile(run, queue)  # type: ignore[arg-type]
    assert (brought.job, brought.changed) == ("55", False)
    assert run_state(run).job == "55"
    assert queue.asked == []


def test_a_start_that_slurm_made_by_itself_is_not_ended(run: RunDirectory, queue: Queue) -> None:
    """It has not claimed the run yet: only Slurm's count of restarts tells it from the old one."""
    open_intent(run, restart_count=2)
    queue.put(7, JobState.RUNNING, restarts=3)
    assert not reconcile(run, queue).changed  # type: ignore[arg-type]
    assert queue.asked == []


def test_an_old_start_that_hangs_on_is_requeued(run: RunDirectory, queue: Queue) -> None:
    open_intent(run, restart_count=2)
    queue.put(7, JobState.COMPLETING, restarts=2)
    assert reconcile(run, queue).changed  # type: ignore[arg-type]
    assert queue.asked == ["requeue 7"]


def test_a_person_does_not_wait_for_ever(
    run: RunDirectory, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert timedelta(seconds=30) >= asked_back._PATIENCE
    monkeypatch.setattr(asked_back, "_PATIENCE", timedelta(0))
    open_intent(run)
    monkeypatch.setattr(
        queue, "requeue", lambda job: RequeueReply(RequeueAnswer.UNREACHABLE, "no answer")
    )
    with pytest.raises(RunDirectoryError, match="not confirmed the requeue"):
        reconcile(run, queue, sleep=[].append)  # type: ignore[arg-type]


def decided(**more: object) -> DecisionTaken:
    """Memory raised by half for the first time, n7 left out, a pause of ten minutes."""
    body: dict[str, object] = {
        "action": Action.RAISE_MEM,
        "cause": Cause.HOST_OOM,
        "incident_id": "1.1.1",
        "reason": "out of memory",
        "plan": RecoveryPlan(exclude_nodes=("n7",), mem_factor=1.5),
        "changes": (Change("mem_factor", "1.0", "1.5"),),
        "wait_s": 600.0,
    }
    return DecisionTaken(decision=Decision(**{**body, **more}))  # type: ignore[arg-type]


def left_open(run: RunDirectory, **more: object) -> None:
    intent = RequeueIntended(job="7", method="scontrol requeue", reason="out of memory")
    attempted(run, decided(**more), intent, AttemptEnded(outcome="open"))


WANTED = "ExcNodeList=n[1-2,5,7] MinMemoryNode=3072"


def test_what_was_decided_with_the_intent_is_asked_for(run: RunDirectory, queue: Queue) -> None:
    left_open(run)
    queue.put(7, JobState.PREEMPTED, memory_per_node=2 << 30, excluded_nodes="n[1-2,5]")
    queue.requeue = lambda job: (  # type: ignore[method-assign]
        queue.asked.append("requeue 7") or RequeueReply(RequeueAnswer.REQUEUED, "")
    )
    assert reconcile(run, queue, clock=lambda: 181.0).changed  # type: ignore[arg-type]
    assert queue.asked == ["requeue 7", f"update 7 {WANTED} StartTime=now+420"]


def test_a_job_that_waits_already_is_given_what_was_decided(
    run: RunDirectory, queue: Queue
) -> None:
    left_open(run)
    queue.put(7, JobState.PENDING, memory_per_node=2 << 30, excluded_nodes="n[1-2,5]")
    said = reconcile(run, queue, clock=lambda: 9e9).text  # type: ignore[arg-type]
    assert queue.asked == [f"update 7 {WANTED}"], "the pause is over"
    assert "MinMemoryNode=3072" in said


def test_what_slurm_refuses_of_it_is_told(run: RunDirectory, queue: Queue) -> None:
    left_open(run)
    queue.put(7, JobState.PENDING)
    queue.refuses = True
    assert "refused" in reconcile(run, queue).text  # type: ignore[arg-type]


def test_a_successor_is_given_what_was_decided(run: RunDirectory, queue: Queue) -> None:
    left_open(run, wait_s=0.0)
    keep_successor(run, "#!/bin/bash\n")
    reconcile(run, queue)  # type: ignore[arg-type]
    (line,) = [word for word in queue.asked if word.startswith("sbatch")]
    assert "--exclude=n[1-2,7]" in line


def test_a_job_that_was_cancelled_since_is_left_alone(run: RunDirectory, queue: Queue) -> None:
    left_open(run)
    queue.put(7, JobState.CANCELLED)
    brought = reconcile(run, queue)  # type: ignore[arg-type]
    assert (brought.job, brought.changed) == ("7", False)
    assert "was cancelled since; to continue: slurm-forge requeue r" in brought.text
    assert queue.asked == []
    state = run_state(run)
    assert (state.status, state.open_intent) == (RunStatus.CANCELLED, None)


@pytest.mark.parametrize("known", [None, JobState.COMPLETING])
def test_a_cancelled_job_that_only_accounting_knows_is_left_alone(
    run: RunDirectory, queue: Queue, known: JobState | None
) -> None:
    left_open(run)
    keep_successor(run, "#!/bin/bash\n")
    queue.accounted = JobState.CANCELLED
    if known is not None:
        queue.put(7, known)
    assert not reconcile(run, queue).changed  # type: ignore[arg-type]
    assert queue.asked == []
    assert run_state(run).status is RunStatus.CANCELLED


@pytest.mark.parametrize("accounted", [None, JobState.RUNNING])
def test_a_watcher_waits_until_a_job_has_ended(
    run: RunDirectory, queue: Queue, accounted: JobState | None
) -> None:
    """While it is completing, and accounting lags, a cancelled job looks like any other."""
    left_open(run)
    queue.accounted = accounted
    queue.put(7, JobState.COMPLETING)
    assert not reconcile(run, queue, by_person=False).changed  # type: ignore[arg-type]
    assert queue.asked == []
    queue.put(7, JobState.CANCELLED)
    assert not reconcile(run, queue, by_person=False).changed  # type: ignore[arg-type]
    assert queue.asked == [] and run_state(run).status is RunStatus.CANCELLED


def test_a_watcher_waits_for_accounting_where_only_that_knows_of_a_cancellation(
    run: RunDirectory, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site without ``sacct`` has none to wait for."""
    left_open(run)
    keep_successor(run, "#!/bin/bash\n")

    def silent(job: str, status: int = 1) -> tuple[AccountingRecord, ...]:
        raise SlurmUnreachableError(["sacct"], status, "no database")

    monkeypatch.setattr(queue, "accounting", silent)
    with pytest.raises(SlurmUnreachableError):
        reconcile(run, queue, by_person=False)  # type: ignore[arg-type]
    assert queue.asked == []
    monkeypatch.setattr(queue, "accounting", lambda job: silent(job, 127))
    assert reconcile(run, queue, by_person=False).changed  # type: ignore[arg-type]


def test_a_watcher_does_not_guess_what_a_forgotten_job_was_ended_for(
    run: RunDirectory, queue: Queue
) -> None:
    guess = Incident(id="1.1", cause=Cause.PREEMPTED, confidence=Confidence.GUESS)
    intent = RequeueIntended(job="7", method="scontrol requeue", reason="preempted: requeue")
    attempted(run, IncidentSeen(incident=guess), intent, AttemptEnded(outcome="open"))
    keep_successor(run, "#!/bin/bash\n")
    left = reconcile(run, queue, by_person=False)  # type: ignore[arg-type]
    assert (left.changed, queue.asked) == (False, [])
    assert "slurm-forge reconcile r" in left.text
    assert reconcile(run, queue).changed  # type: ignore[arg-type]


# -- a plan that leaves too much out --------------------------------------------------------------


def test_a_plan_of_many_nodes_makes_no_job_that_never_starts(
    run: RunDirectory, queue: Queue
) -> None:
    plan = RecoveryPlan(exclude_nodes=tuple(f"n{number}" for number in range(3, 8)))
    held(run, in_queue=False, plan=plan)
    queue.nodes = "n[1-6]"
    back(run, queue, exclude=("n6",))
    # Of n1 to n6 the job leaves n1 and n2 out, the ledger n6: one is needed.
    assert queue.asked == ["sbatch --exclude=n[1-4,6] job.sbatch"]


def test_what_was_raised_already_is_not_raised_again(run: RunDirectory, queue: Queue) -> None:
    attempted(run, decided(), AttemptEnded(outcome="requeued"))
    queue.put(7, JobState.CANCELLED, memory_per_node=3 << 30)
    back(run, queue)
    assert "--mem=3072M" in queue.asked[0]


# -- what a person asks for otherwise -------------------------------------------------------------

ASKED = ResourceChanges(mem="64G", time="2-00:00:00", exclude="n9", partition="long")


def test_a_held_job_is_changed_before_it_is_released(run: RunDirectory, queue: Queue) -> None:
    held(run)
    queue.put(7, JobState.PENDING, priority=0, reason="JobHeldUser", excluded_nodes="n5")
    assert back(run, queue, changes=ASKED).text == "changed and released job 7, which was held"
    assert queue.asked == [
        "update 7 ExcNodeList=n[1-2,5,9] TimeLimit=2-00:00:00 MinMemoryNode=65536 Partition=long",
        "release 7",
    ]
    kept = read_run_file(run.spec_file).job.resources
    assert (kept.mem, kept.exclude, kept.partition) == (64 << 30, "n[1-2,9]", "long")
    records = sorted(read_journal(run)[0], key=lambda r: r.time)  # every note is a file of its own
    verbs = [r.event.verb for r in records if isinstance(r.event, UserAsked)]
    assert verbs[0].startswith("change resources.mem: was not given")
    assert verbs[-1] == "requeue"


def test_what_slurm_refuses_is_not_kept(run: RunDirectory, queue: Queue) -> None:
    held(run)
    queue.put(7, JobState.PENDING, priority=0, reason="JobHeldUser")
    queue.refuses = True
    before = run.spec_file.read_bytes()
    with pytest.raises(SlurmCommandError):
        back(run, queue, changes=ASKED)
    assert run.spec_file.read_bytes() == before
    assert run_state(run).status is RunStatus.HELD


def test_a_waiting_job_that_nobody_holds_is_changed(run: RunDirectory, queue: Queue) -> None:
    attempted(run)
    queue.put(7, JobState.PENDING, priority=100)
    assert back(run, queue, changes=ResourceChanges(mem="8G")).changed
    assert queue.asked == ["update 7 MinMemoryNode=8192"]


def test_a_run_that_left_the_queue_is_submitted_as_asked(run: RunDirectory, queue: Queue) -> None:
    held(run, in_queue=False, plan=RecoveryPlan(mem_factor=1.5))
    back(run, queue, changes=ASKED)
    script = job_script(run).read_text()
    assert "#SBATCH --exclude=n[1-2,9]" in script
    assert "#SBATCH --partition=long" in script
    (line,) = queue.asked
    said = line.split()[1:-1]
    assert [word for word in said if word.startswith("--mem")][-1] == "--mem=65536M", "as it says"


def test_a_run_of_submitit_is_submitted_as_asked(run: RunDirectory, queue: Queue) -> None:
    held(run, in_queue=False)
    keep_payload(run, lambda path: path.write_bytes(b"pickle"))
    keep_successor(run, "#!/bin/bash\n#SBATCH --exclude='n[1-2]'\npayload\n")
    back(run, queue, changes=ASKED)
    (line,) = queue.asked
    for word in ("--exclude=n[1-2,9]", "--mem=65536M", "--time=2-00:00:00", "--partition=long"):
        assert word in line


def test_a_job_that_runs_is_not_changed(run: RunDirectory, queue: Queue) -> None:
    attempted(run)
    queue.put(7, JobState.RUNNING)
    before = run.spec_file.read_bytes()
    with pytest.raises(RunDirectoryError, match=r"can't be changed\n.*slurm-forge stop r"):
        back(run, queue, changes=ASKED)
    assert run.spec_file.read_bytes() == before


def test_a_value_that_can_not_be_names_its_key(run: RunDirectory, queue: Queue) -> None:
    held(run)
    queue.put(7, JobState.PENDING, priority=0)
    with pytest.raises(ConfigError, match=r"resources\.mem"):
        back(run, queue, changes=ResourceChanges(mem="much"))
    assert queue.asked == []


# -- nodes that are left out ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "nodes", "expected"),
    [
        ("", [], ()),
        ("#SBATCH --exclude=n1\n", [], ()),
        ("", ["n2", "n1"], ("--exclude=n[1-2]",)),
        ("#SBATCH --exclude='n[1-3]'\n", ["n7"], ("--exclude=n[1-3,7]",)),
        ("#SBATCH --exclude=n1\n#SBATCH --exclude=n5\n", ["n7"], ("--exclude=n[5,7]",)),
        ("#SBATCH --nodelist=n[1-2]\n", ["n2"], ()),
        ("#SBATCH --exclude=/home/me/nodes\n", ["n2"], ()),
    ],
)
def test_the_job_s_own_exclusions_stay(
    script: str, nodes: list[str], expected: tuple[str, ...]
) -> None:
    assert leave_out(script, nodes) == expected


@pytest.mark.parametrize("extra", [{"hetjob": ""}, {"het-group": "0"}, {"licenses": "a:1 : b:2"}])
def test_a_run_is_one_job(tmp_path: Path, queue: Queue, extra: dict[str, str]) -> None:
    spec = {"name": "het", "entry": "a:b", "resources": {"extra": extra}}
    with pytest.raises(ConfigError, match=r"several jobs in one|one kind of node"):
        job = job_from_mapping(spec)
        run, file = create_run(job, runs=tmp_path / "x", site=SITE, submitted_from=tmp_path)
        submit_script(run, file, SITE, queue)  # type: ignore[arg-type]
    assert queue.asked == []
