from __future__ import annotations

import errno
import sys
import time
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.control import BRIEF_KEY, LaunchBrief
from slurm_forge.errors import FencedError, RunDirectoryError
from slurm_forge.journal import RunStatus, compact_journal, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.journal.file import AppendFile
from slurm_forge.json_codec import parse
from slurm_forge.launch.attempt.attempt import (
    Attempt,
    StartRefusal,
    begin,
)
from slurm_forge.launch.attempt.job_attempt import refusal_text
from slurm_forge.launch.requeue.reconcile import reconcile
from slurm_forge.recovery import LaunchFacts, classify
from slurm_forge.recovery.incident.launch_facts import LostRank, RankFailure
from slurm_forge.recovery.monitor.stalls import Stall
from slurm_forge.recovery.monitor.straggler_reports import (
    Straggler,
    StragglerCause,
)
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import (
    RequeueAnswer,
    RequeueReply,
)
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Decision
from tests.unit.checkpoint.helpers import save, weights

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=timezone.utc)
CRASHED = LaunchFacts(now=NOW, step=7, lost=(LostRank(1, "n1"),), exit_status=139)
FINISHED = LaunchFacts(now=NOW, step=9, finished=True, exit_status=0)
IN_GRACE = JobRecord(
    job_id=42, name="x", state=JobState.RUNNING, state_text="RUNNING", preempt_time=NOW
)
STALLED = Stall(
    cause=Cause.HANG, late_ranks=(1,), late_hosts=("n1",), step=7, since=timedelta(seconds=40),
    limit=timedelta(seconds=30), evidence=(),
)  # fmt: skip
PREEMPTED = LaunchFacts(now=NOW, step=7, rank_signals=("SIGTERM",), job_at_notice=IN_GRACE)


class Hub:
    """What an attempt needs of one."""

    world_size = 2

    def __init__(self) -> None:
        self.published: dict[str, str] = {}

    def publish(self, key: str, value: str) -> None:
        self.published[key] = value


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.at(tmp_path / "tiny")
    spec = job_from_mapping({"name": "tiny", "entry": "a.b:train"})
    file = RunFile(submitted_from=str(tmp_path), python=sys.executable, job=spec)
    run.create(file.to_yaml().encode())
    return run


def start(run: RunDirectory) -> Attempt | StartRefusal:
    return begin(run, job="42", restart_count=0, nodes=("n0", "n1"), via="sbatch")


def started(run: RunDirectory) -> Attempt:
    attempt = start(run)
    assert isinstance(attempt, Attempt)
    return attempt


def launch(attempt: Attempt) -> LaunchBrief:
    hub = Hub()
    attempt.next_launch(hub)  # type: ignore[arg-type]
    return parse(LaunchBrief, hub.published[BRIEF_KEY])


def conclude(attempt: Attempt, facts: LaunchFacts) -> Decision:
    decision = attempt.conclude(facts)
    assert decision is not None
    return decision


def test_an_attempt_claims_the_run_and_says_so(run: RunDirectory) -> None:
    attempt = started(run)
    state = attempt.state()
    assert (attempt.claim.attempt, state.status, state.job) == (1, RunStatus.RUNNING, "42")
    assert [a.nodes for a in state.attempts] == [("n0", "n1")]


def test_a_run_that_is_finished_is_not_begun_again(run: RunDirectory) -> None:
    attempt = started(run)
    launch(attempt)
    assert attempt.conclude(FINISHED) is None
    attempt.end("finished")
    assert run.is_done()
    assert attempt.state().status is RunStatus.FINISHED
    assert start(run) is StartRefusal.DONE
    assert not (run.attempts / "2.json").exists()
    assert "OTHER" not in refusal_text(run, StartRefusal.DONE)
    of_a_command = refusal_text(run, StartRefusal.DONE, command=True)
    assert (
        of_a_command == f"{run.name}: finished already: nothing to do.   another run: --name OTHER"
    )


def test_a_stop_file_keeps_a_run_from_starting_until_it_is_gone(run: RunDirectory) -> None:
    run.stop_file.touch()
    assert start(run) is StartRefusal.STOP_FILE
    run.stop_file.unlink()
    started(run)


def test_what_was_published_last_is_known_where_rank_0_could_not_say_so(run: RunDirectory) -> None:
    """srun ends the ranks the moment that somebody cancels the job."""
    attempt = started(run)
    launch(attempt)
    store = CheckpointStore(run.checkpoints, attempt.file.job.name)
    saved = [save(store, weights(0.0), step, 1, 1).name for step in (20, 21)]
    attempt.journal.write(
        ev.CheckpointCommitted(name=str(saved[0]), step=20, reason="", seconds=1.0, size=1)
    )
    save(store, weights(0.0), 99, 7, 1)  # nothing of this launch
    attempt.note_published()
    attempt.note_published()
    assert attempt.state().committed_step == 21
    assert [each.name for each in attempt.state().known] == saved


def test_a_run_that_is_held_waits_for_a_person(run: RunDirectory) -> None:
    for _ in range(9):
        attempt = start(run)
        if isinstance(attempt, StartRefusal):
            break
        launch(attempt)
        decision = conclude(attempt, CRASHED)
        attempt.end(decision.action.value)
    assert attempt is StartRefusal.AT_REST
    assert decision.action is Action.HOLD


def test_after_scancel_a_start_by_slurm_does_nothing(run: RunDirectory) -> None:
    attempt = started(run)
    launch(attempt)
    cancelled = JobRecord(
        job_id=42, name="x", state=JobState.COMPLETING, state_text="COMPLETING", end_time=NOW
    )
    facts = LaunchFacts(now=NOW, batch_signals=("SIGTERM",), job_at_notice=cancelled)
    assert conclude(attempt, facts).action is Action.STOP
    assert attempt.state().status is RunStatus.CANCELLED
    assert start(run) is StartRefusal.AT_REST


def test_ranks_are_told_the_plan_and_what_was_committed(run: RunDirectory) -> None:
    attempt = started(run)
    assert launch(attempt).committed_step is None
    attempt.journal.write(ev.CheckpointCommitted(name="c", step=5, reason="", seconds=1.0, size=1))
    oom = RankFailure(
        rank=1, host="n1", cause=Cause.CUDA_OOM, step=6, text="out of memory", micro_batch=8
    )
    decision = conclude(attempt, LaunchFacts(now=NOW, step=6, failures=(oom,)))
    assert decision.action is Action.SHRINK_MICRO_BATCH
    brief = launch(attempt)
    assert (brief.attempt, brief.launch, brief.committed_step) == (1, 2, 5)
    assert brief.plan.micro_batch == 4


def test_launches_are_numbered_and_every_incident_is_its_own(run: RunDirectory) -> None:
    attempt = started(run)
    ids = []
    for _ in range(2):
        launch(attempt)
        ids.append(conclude(attempt, CRASHED).incident_id)
    assert ids == ["1.1", "1.2"]
    (state,) = attempt.state().attempts
    assert [(found.number, found.outcome) for found in state.launches] == [
        (1, "crash"),
        (2, "crash"),
    ]


def test_an_attempt_that_was_overtaken_launches_and_finishes_nothing(run: RunDirectory) -> None:
    old = started(run)
    launch(old)
    started(run)
    with pytest.raises(FencedError):
        launch(old)
    with pytest.raises(FencedError):
        old.conclude(FINISHED)
    assert not run.is_done()


UNEXPLAINED = LaunchFacts(now=NOW, step=7, rank_signals=("SIGTERM",))


def test_a_preemption_that_slurm_tells_of_later_is_one_incident_and_certain(
    run: RunDirectory,
) -> None:
    attempt = started(run)
    launch(attempt)
    assert conclude(attempt, UNEXPLAINED).action is Action.REQUEUE
    attempt.journal.write(ev.RequeueIntended(job="42", method="scontrol requeue", reason="why"))
    attempt.learn(classify(PREEMPTED, attempt.incident_id))
    attempt.learn(classify(UNEXPLAINED, attempt.incident_id))  # what is known stays known
    (told,) = attempt.state().attempts
    ((_, incident),) = told.incidents
    assert (incident.cause, incident.confidence) == (Cause.PREEMPTED, Confidence.CERTAIN)
    assert len(told.decisions) == 1
    records, _ = read_journal(run)
    now = time.time()
    facts = RunFacts(
        name="tiny", path=str(run.path), reference="tiny", now=now, records=tuple(records)
    )
    text = explain_text(explain(facts), now=now, reference="tiny")
    assert "PreemptTime=12:00:00" in text and "is not known yet" not in text, text
    assert (text.count("preempted"), text.count("to be requeued")) == (1, 1), text


def test_a_preemption_that_slurm_has_told_of_needs_no_person(run: RunDirectory) -> None:
    """``watch`` brings it back also once Slurm has forgotten the job."""

    class Forgets:
        def show_job(self, job: str) -> None:
            return None

        def accounting(self, job: str) -> tuple[()]:
            return ()

        queue = accounting

        def requeue(self, job: str) -> RequeueReply:
            return RequeueReply(RequeueAnswer.REQUEUED, "")

    attempt = started(run)
    launch(attempt)
    conclude(attempt, UNEXPLAINED)
    attempt.journal.write(ev.RequeueIntended(job="42", method="scontrol requeue", reason="why"))
    slurm: Any = Forgets()
    assert not reconcile(run, slurm, by_person=False).changed
    attempt.learn(classify(PREEMPTED, attempt.incident_id))
    assert reconcile(run, slurm, by_person=False).changed


def full(file: AppendFile, line: bytes, sync: bool = False) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_does_not_keep_a_preempted_run_from_coming_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = started(run)
    launch(attempt)
    monkeypatch.setattr(AppendFile, "append", full)
    assert conclude(attempt, PREEMPTED).action is Action.REQUEUE
    attempt.end("requeued")


def test_what_must_be_counted_is_not_done_where_it_can_not_be(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash that is relaunched without being charged would be relaunched for ever."""
    attempt = started(run)
    launch(attempt)
    monkeypatch.setattr(AppendFile, "append", full)
    with pytest.raises(RunDirectoryError, match="No space left") as raised:
        attempt.conclude(CRASHED)
    assert "quota" in raised.value.next_step


def test_an_attempt_that_was_overtaken_is_not_judged(run: RunDirectory) -> None:
    """Its ranks end with an error of ours, which is none of the program's."""
    old = started(run)
    launch(old)
    started(run)
    with pytest.raises(FencedError):
        old.conclude(CRASHED)
    first, second = old.state().attempts
    ((_, found_out),) = first.incidents
    assert found_out.cause is Cause.UNKNOWN, "what its successor found out, and nothing of its own"
    assert old.state().status is RunStatus.RUNNING
    assert second.number == 2


def stalled(attempt: Attempt) -> bool:
    return attempt.only_warns(LaunchFacts(now=NOW, step=7, stalled=STALLED))


@pytest.mark.parametrize(
    ("ladder", "warns"),
    [
        ([{"do": "requeue", "times": 1, "exclude_node": True}], False),
        ([{"do": "hold"}], False),
        ([{"do": "warn"}], True),
        ([], True),
    ],
)
def test_a_slow_node_is_never_what_a_run_is_held_for_by_itself(
    tmp_path: Path, ladder: list[dict[str, object]], warns: bool
) -> None:
    slow = Straggler(
        host="n06",
        ranks=(3,),
        factor=1.6,
        trial=1.6,
        why=StragglerCause.NODE,
        since_step=5,
        lost_s=0.1,
    )
    run = RunDirectory.at(tmp_path / "tiny")
    spec = job_from_mapping(
        {"name": "tiny", "entry": "a.b:train", "recovery": {"straggler": ladder}}
    )
    file = RunFile(submitted_from=str(tmp_path), python=sys.executable, job=spec)
    run.create(file.to_yaml().encode())
    attempt = started(run)
    launch(attempt)
    assert attempt.only_warns(LaunchFacts(now=NOW, step=7, straggler=slow)) is warns


def test_a_standstill_that_the_ladder_only_warns_of_is_written_down_and_goes_on(
    run: RunDirectory,
) -> None:
    attempt = started(run)
    launch(attempt)
    assert not stalled(attempt), "the default ladder starts the ranks again"
    assert attempt.state().attempts[0].incidents == ()
    ladder = {"hang": [{"do": "warn", "times": 2}, {"do": "relaunch", "times": 1}]}
    changed = job_from_mapping({"name": "tiny", "entry": "a.b:train", "recovery": ladder})
    attempt.file = attempt.file.model_copy(update={"job": changed})
    assert [stalled(attempt) for _ in range(3)] == [True, True, False]
    state = attempt.state()
    assert [d.action for _, d in state.attempts[0].decisions] == [Action.WARN, Action.WARN]
    assert len({i.id for _, i in state.attempts[0].incidents}) == 2
    facts = LaunchFacts(now=NOW, step=7, stalled=STALLED)
    assert conclude(attempt, facts).action is Action.RELAUNCH


def test_attempts_that_are_long_over_are_archived_by_one_that_begins(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partial(compact_journal, block=4, kept=2)
    monkeypatch.setattr("slurm_forge.launch.attempt.attempt.compact_journal", small)
    for number in range(1, 7):
        assert not list(run.journal.glob("archive-*"))
        attempt = started(run)
        assert attempt.claim.attempt == number
        attempt.end("requeued")
    assert [path.name for path in run.journal.glob("archive-*")] == ["archive-4.jsonl"]
    assert len(list(run.journal.glob("*-supervisor-*"))) == 2
    state = started(run).state()
    assert [each.number for each in state.attempts] == list(range(1, 8))
    assert state == fold(read_journal(run)[0])
