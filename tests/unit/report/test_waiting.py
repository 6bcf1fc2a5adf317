"""Why a run waits, as Slurm says and a reader understands it; who can let a held one go on."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from slurm_forge.cli.observe.surroundings import with_queue
from slurm_forge.journal import events as ev
from slurm_forge.journal.comebacks import NEXT_TASK
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.report_facts import (
    NotStarted,
    RunFacts,
)
from slurm_forge.report.status.run_listing import (
    listed,
    listing,
    listing_text,
)
from slurm_forge.report.status.status import take_status
from slurm_forge.report.status.status_text import status_text
from slurm_forge.report.story.queue_reason import (
    QueueAnswer,
    job_to_ask_about,
    why_waiting,
)
from slurm_forge.report.text import moment
from slurm_forge.slurm.records import AccountingRecord, JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.parsing import parse_jobs
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.unit.report.journals import TUESDAY, Scribe

DATA = Path(__file__).parents[1] / "slurm" / "data"
JOB = "8812301"
AGAIN = "slurm-forge requeue tiny-gpt"


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path)


def screen(facts: RunFacts) -> dict[str, str]:
    """Label to value; several lines of one label are joined."""
    found: dict[str, str] = {}
    for line in status_text(take_status(facts), zone=timezone.utc).splitlines():
        label, value = line[:11].strip(), line[12:]
        found[label] = f"{found[label]} | {value}" if label in found else value
    return found


def told(facts: RunFacts) -> str:
    return explain_text(explain(facts), now=facts.now, reference="tiny-gpt", zone=timezone.utc)


def pending(
    reason: str | None, *, job: str = JOB, state: JobState = JobState.PENDING, **more: object
) -> QueueAnswer:
    record = JobRecord(
        job_id=int(job), name="x", state=state, state_text=state.value, reason=reason, priority=7
    )
    return QueueAnswer(job, replace(record, **more))  # type: ignore[arg-type]


def canned(name: str) -> QueueAnswer:
    (record,) = parse_jobs((DATA / f"{name}.txt").read_text())
    return QueueAnswer(str(record.job_id), record)


def requeued(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.preempted(20)


def held(scribe: Scribe, *, refused: str = "", confirmed: bool = True) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    reason = "crash: the same crash 3 times; next: look at the log of rank 0"
    scribe.incident(Cause.CRASH, Action.HOLD, reason=reason, rung=None, step=20)
    scribe.held(reason, refused=refused, confirmed=confirmed)


@pytest.mark.parametrize(
    ("reason", "text", "next_"),
    [
        ("Priority", "other jobs come first (Priority)", "nothing to do: it starts when"),
        ("Resources", "it is next in line, waiting for free nodes (Resources)", "nothing to do"),
        ("JobHeldUser", "held in the queue", f"scontrol release {JOB}, or {AGAIN}"),
        ("JobHeldAdmin", "held by an administrator: only they can", "ask the cluster's support"),
        ("JobHoldMaxRequeue", "requeued too often (MaxBatchRequeue)", f"scontrol release {JOB}"),
        ("launch_failed_requeued_held", "its start failed on the node", "scontrol release"),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_x",
            "other jobs have its nodes, probably the one that preempted it (Nodes required",
            "nothing to do",
        ),
        ("ReqNodeNotAvail,_UnavailableNodes:n06", "UnavailableNodes:n06)", "sinfo -R"),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", "overlaps a maintenance", "starts after"),
        ("QOSMaxJobsPerUserLimit", "a limit of the QOS is reached (QOSMax", "nothing to do"),
        ("QOSMaxWallDurationPerJobLimit", "a limit of the QOS is reached", "will not start like"),
        ("AssocGrpCPUMinutesLimit", "the budget of the account or the user", "will not start unt"),
        ("AssocGrpBillingMinutes", "is used up (AssocGrpBillingMinutes)", "wait for the reset"),
        ("QOSGrpGRESMinutes", "the budget of the QOS is used up", "ask for more, or wait"),
        ("QOSGrpWallLimit", "the budget of the QOS is used up", "ask for more, or wait"),
        ("AssocGrpCPURunMinutesLimit", "a limit of the account", "nothing to do"),
        ("QOSMinCpuNotSatisfied", "less than the QOS requires", "will not start like this"),
        ("QOSMinGRES", "less than the QOS requires", "will not start like this: ask for more"),
        ("MaxMemPerLimit", "more memory than one job may have", "ask for less memory"),
        ("QOSUsageThreshold", "exceeded its usage threshold", "will not start like this"),
        ("PartitionConfig", "its partition cannot provide", "will not start like this"),
        ("Reserved_for_maintenance", "overlaps a maintenance", "starts after"),
        ("AssocGrpCpuLimit", "a limit of the account or the user is reached", "nothing to do"),
        ("PartitionTimeLimit", "more time than its partition allows", f"JobId={JOB} TimeLimit="),
        ("DependencyNeverSatisfied", "did not end as required", f"scancel {JOB}, then {AGAIN}"),
        ("Reservation", "waits for its reservation to begin (Reservation)", "nothing to do"),
        ("ReservationDeleted", "its reservation is gone", "without the reservation"),
        ("Reservation_dev_was_deleted", "its reservation is gone", "without the reservation"),
        ("ReservationInvalid", "its reservation is no longer valid", "without the reservation"),
        ("Reservation_dev_is_invalid", "reservation is no longer valid", "without the reservation"),
        ("ReservationOfANewKind", "Slurm says: ReservationOfANewKind", f"squeue -j {JOB}"),
        ("Licenses,Dependency", "waits for a licence (Licenses,Dependency)", "nothing to do"),
        ("BeamMeUp\x1b[2J", "Slurm says: BeamMeUp?[2J", f"squeue -j {JOB}"),
        (None, "Slurm gives no reason", f"squeue -j {JOB}"),
    ],
)  # fmt: skip
def test_reasons_in_plain_words(scribe: Scribe, reason: str | None, text: str, next_: str) -> None:
    requeued(scribe)
    facts = replace(scribe.facts(after=60), queue=pending(reason))
    shown = screen(facts)
    assert shown["status"].startswith("requeued 60 s ago, waiting to start again: ")
    assert text in shown["status"]
    assert next_ in shown["next"]
    assert text in told(facts)
    assert "\x1b" not in told(facts)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("SomethingNew", " (Slurm says: SomethingNew)"),
        ("Dependency", " (Slurm says: Dependency)"),
        ("BeginTime", " (Slurm says: BeginTime)"),
        ("Priority", " (Slurm says: Priority)"),
        ("None", ""),
        (None, ""),
    ],
)
def test_a_job_of_priority_0_is_held_whatever_slurm_says(
    scribe: Scribe, reason: str | None, said: str
) -> None:
    requeued(scribe)
    facts = replace(scribe.facts(after=60), queue=pending(reason, priority=0))
    shown = screen(facts)
    assert shown["status"].endswith(f": held in the queue{said}")
    assert shown["next"] == f"to continue: scontrol release {JOB}, or {AGAIN}"
    waiting = take_status(facts).waiting
    assert waiting is not None and waiting.held


@pytest.mark.parametrize(
    ("reason", "state", "text"),
    [
        ("BadConstraints", JobState.PENDING, "no node has what it asks for"),
        ("ReservationInvalid", JobState.RESV_DEL_HOLD, "its reservation is no longer valid"),
        ("Reservation_dev_was_deleted", JobState.RESV_DEL_HOLD, "its reservation is gone"),
    ],
)
def test_a_release_is_not_advised_where_it_changes_nothing(
    scribe: Scribe, reason: str, state: JobState, text: str
) -> None:
    requeued(scribe)
    shown = screen(replace(scribe.facts(), queue=pending(reason, state=state, priority=0)))
    assert text in shown["status"]
    assert "it will not start like this" in shown["next"]
    assert "scontrol release" not in shown["next"]


def test_a_release_is_advised_only_to_whom_it_is_open(scribe: Scribe) -> None:
    requeued(scribe)
    by_admin = screen(replace(scribe.facts(), queue=pending("JobHeldAdmin")))
    assert "scontrol release" not in by_admin["next"]


def test_records_of_a_real_slurm() -> None:
    told_of = why_waiting(canned("job_held"), again=AGAIN, now=TUESDAY)
    assert (told_of.text, told_of.held) == ("held in the queue", True)
    told_of = why_waiting(canned("job_requeued_and_held"), again=AGAIN, now=TUESDAY)
    assert (told_of.text, told_of.held) == (
        "held by an administrator or by yourself (scontrol requeuehold)",
        True,
    )
    delayed = canned("job_pending_requeued")
    start = 1795255044.0
    told_of = why_waiting(delayed, again=AGAIN, now=start - 121, zone=timezone.utc)
    when = moment(start, start, timezone.utc)
    assert told_of.text == f"it may not start before {when} (in 2 min 1 s)"
    assert (told_of.expected, told_of.held) == (start, False)
    told_of = why_waiting(delayed, again=AGAIN, now=start + 5, zone=timezone.utc)
    assert told_of.text == "it may not start yet"
    assert told_of.expected is None


def test_when_slurm_expects_to_start_it(scribe: Scribe) -> None:
    requeued(scribe)
    facts = scribe.facts()
    start = datetime.fromtimestamp(facts.now, tz=timezone.utc) + timedelta(hours=3)
    facts = replace(facts, queue=pending("Resources", start_time=start))
    assert f"expects to start it {moment(start.timestamp(), facts.now)}" in screen(facts)["status"]


def test_a_successor_waits_for_the_job_before_it(scribe: Scribe) -> None:
    requeued(scribe)
    queue = pending("Dependency", dependency="afterany:8812300(unfulfilled)")
    shown = screen(replace(scribe.facts(), queue=queue))
    assert shown["status"].endswith(": it starts when job 8812300 has ended")


@pytest.mark.parametrize(
    ("state", "text", "next_"),
    [
        (JobState.RUNNING, "Slurm has started job 8812301 (RUNNING)", "nothing to do"),
        (JobState.COMPLETING, "job 8812301 is still completing on its nodes", "nothing to do"),
        (JobState.FAILED, "Slurm reports job 8812301 as ended (FAILED)", AGAIN),
    ],
)
def test_a_job_that_does_not_wait_at_all(
    scribe: Scribe, state: JobState, text: str, next_: str
) -> None:
    requeued(scribe)
    shown = screen(replace(scribe.facts(), queue=pending("None", state=state)))
    assert text in shown["status"]
    assert next_ in shown["next"]


def cancelled_by_accounting() -> QueueAnswer:
    row = AccountingRecord(
        job_ref=JOB,
        step=None,
        job_id=int(JOB),
        state=JobState.CANCELLED,
        state_text="CANCELLED by 0",
        cancelled_by=0,
    )
    return QueueAnswer(JOB, None, accounted=row)


@pytest.mark.parametrize(
    "answer", [pending("None", state=JobState.CANCELLED), cancelled_by_accounting()]
)
def test_a_job_that_was_cancelled_while_it_waited(scribe: Scribe, answer: QueueAnswer) -> None:
    scribe.submitted()
    facts = replace(scribe.facts(after=60), queue=answer)
    shown = screen(facts)
    assert shown["status"] == f"cancelled: job {JOB} was cancelled before it started"
    assert shown["next"] == f"to continue: {AGAIN}"
    assert shown["next"] in told(facts)
    requeued(scribe)
    shown = screen(replace(scribe.facts(after=60), queue=answer))
    assert shown["status"] == f"cancelled: job {JOB} was cancelled before it started again"


ENDS_AT_ONCE = "it ends at once without training"


@pytest.mark.parametrize(
    ("reason", "turn"),
    [(None, "when its turn comes"), ("Priority", "when its turn comes"), ("JobHeldUser", "once")],
)
def test_a_run_that_waits_and_was_asked_to_stop(
    scribe: Scribe, reason: str | None, turn: str
) -> None:
    """Its job stays in the queue: that there is nothing to do would be wrong."""
    scribe.submitted()
    scribe.run.stop_file.touch()
    scribe.later(5).write("cli", ev.UserAsked(verb="stop", user="alice"), launch=1 << 30)
    facts = scribe.facts(after=60)
    facts = facts if reason is None else replace(facts, queue=pending(reason))
    shown = screen(facts)
    assert f"; alice asked it to stop: {turn}" in shown["status"]
    assert shown["status"].endswith(ENDS_AT_ONCE)
    assert shown["next"].startswith(turn)
    assert shown["next"].endswith(f"{ENDS_AT_ONCE} | to free the queue now: scancel {JOB}")
    assert "alice asked it to stop" in told(facts)
    assert f"scancel {JOB}" in told(facts)


def test_a_stop_that_nobody_signed_and_one_of_a_job_that_is_gone(scribe: Scribe) -> None:
    scribe.submitted()
    scribe.run.stop_file.touch()
    assert "; a STOP file asks it to stop: when" in screen(scribe.facts())["status"]
    cancelled = pending("None", state=JobState.CANCELLED)
    shown = screen(replace(scribe.facts(), queue=cancelled))
    assert shown["next"] == f"to continue: {AGAIN}"
    assert ENDS_AT_ONCE not in shown["status"]


def test_a_job_that_slurm_has_forgotten(scribe: Scribe) -> None:
    requeued(scribe)
    shown = screen(replace(scribe.facts(), queue=QueueAnswer(JOB, None)))
    assert "Slurm no longer knows job 8812301" in shown["status"]
    assert shown["next"] == f"it will not start: {AGAIN}"


def test_an_answer_about_another_job_tells_nothing(scribe: Scribe) -> None:
    requeued(scribe)
    shown = screen(replace(scribe.facts(), queue=pending("Priority", job="99")))
    assert shown["status"] == "requeued just now, waiting to start again"
    assert "squeue -j 8812301" in shown["next"]


def test_what_is_asked_about(scribe: Scribe) -> None:
    assert job_to_ask_about(scribe.facts().records) is None
    scribe.submitted()
    assert job_to_ask_about(scribe.facts().records) == JOB
    scribe.begin()
    # That it runs is only what its journal says: Slurm may know better.
    assert job_to_ask_about(scribe.facts().records) == JOB
    scribe.resume(0)
    scribe.preempted(20)
    assert job_to_ask_about(scribe.facts().records) == JOB


def test_a_local_run_is_nothing_to_ask_slurm_about(scribe: Scribe) -> None:
    scribe.begin(job="local-1", via="submitit local")
    scribe.end("requeued")
    assert job_to_ask_about(scribe.facts().records) is None


def test_a_run_that_is_held_in_the_queue_says_who_can_release_it(scribe: Scribe) -> None:
    held(scribe)
    facts = scribe.facts(after=60)
    assert job_to_ask_about(facts.records) == JOB
    shown = screen(facts)
    assert shown["status"] == (
        "held: crash: the same crash 3 times; held in Slurm's queue as job 8812301"
    )
    assert shown["next"] == (
        "see why: slurm-forge explain tiny-gpt | "
        f"then, to continue: scontrol release {JOB}, or {AGAIN}"
    )
    text = told(facts)
    assert "    held: the same crash 3 times · in Slurm's queue as job 8812301 until" in text
    assert f"Next: look at the log of rank 0, then scontrol release {JOB}, or {AGAIN}.\n" in text


def test_a_hold_that_was_not_confirmed_is_not_told_as_done(scribe: Scribe) -> None:
    held(scribe, confirmed=False)
    facts = scribe.facts()
    assert screen(facts)["status"].endswith(f"; asked Slurm to hold it in its queue as job {JOB}")
    assert f"asked Slurm to hold job {JOB} in the queue" in told(facts)
    seen = screen(replace(facts, queue=pending("JobHeldUser")))
    assert seen["status"].endswith(f"; held in Slurm's queue as job {JOB}")


def test_a_job_that_could_not_be_held_since_it_waits_is_not_told_as_gone(scribe: Scribe) -> None:
    held(scribe, refused="it waits in the queue, and can't be held")
    assert screen(scribe.facts())["status"].endswith("it waits in the queue, and can't be held")


def test_a_hold_that_slurm_refused_leaves_nothing_to_release(scribe: Scribe) -> None:
    held(scribe, refused="Requested operation is presently disabled")
    shown = screen(scribe.facts())
    assert shown["status"] == (
        f"held: crash: the same crash 3 times; Slurm refused to hold job {JOB} in the queue: "
        "Requested operation is presently disabled; it is not queued"
    )
    assert f"refused to hold job {JOB} in the queue" in told(scribe.facts())
    assert "scontrol release" not in shown["next"]
    text = told(scribe.facts())
    assert "scontrol release" not in text
    assert "scontrol requeuehold failed: Requested operation is presently dis" in text
    assert "in Slurm's queue" not in text


def test_a_held_job_of_which_slurm_knows_better(scribe: Scribe) -> None:
    held(scribe)
    by_admin = replace(scribe.facts(), queue=pending("JobHeldAdmin"))
    assert screen(by_admin)["status"].endswith("by an administrator, who alone can release it")
    assert "scontrol release" not in screen(by_admin)["next"]
    assert "ask the cluster's support" in screen(by_admin)["next"]
    assert AGAIN not in screen(by_admin)["next"]
    assert "Next: look at the log of rank 0, then ask the cluster's support why" in told(by_admin)
    gone = replace(scribe.facts(), queue=QueueAnswer(JOB, None))
    assert screen(gone)["status"].endswith("; Slurm no longer knows job 8812301")
    assert screen(gone)["next"].endswith(f"then, to continue: {AGAIN}")
    there = replace(scribe.facts(), queue=pending("job_requeued_in_held_state"))
    assert f"scontrol release {JOB}" in screen(there)["next"]


def test_the_next_start_ends_the_hold(scribe: Scribe) -> None:
    held(scribe)
    scribe.later(60).begin()
    assert "held" not in screen(scribe.facts())["status"]
    scribe.resume(0)
    assert "scontrol release" not in told(scribe.facts())


def test_a_chain_of_jobs(scribe: Scribe) -> None:
    method = "sbatch --dependency=afterany"
    scribe.submitted("12")
    for job, successor in (("12", "15"), ("15", "18")):
        scribe.begin(job=job)
        scribe.resume(0)
        scribe.incident(Cause.PREEMPTED, Action.REQUEUE)
        scribe.write("supervisor", ev.RequeueDone(job=job, method=method, successor=successor))
        scribe.end("successor")
    facts = scribe.facts()
    assert take_status(facts).jobs == ("12", "15", "18")
    assert screen(facts)["job"] == "18   (jobs 12 → 15 → 18)"
    assert "\n   jobs 12 → 15 → 18\n" in told(facts)
    line = listed(facts, take_status(facts))
    assert "   job 18   " in listing_text(listing("runs", [line]))


def test_a_long_chain_names_its_ends(scribe: Scribe) -> None:
    for number in range(50):
        scribe.begin(job=str(100 + number))
    job = screen(scribe.facts())["job"]
    assert job == "149   (jobs 100 → 101 → 102 → (44 more) → 147 → 148 → 149)"


def test_one_job_is_no_chain(scribe: Scribe) -> None:
    requeued(scribe)
    scribe.later(60).begin()
    assert screen(scribe.facts())["job"] == JOB
    assert "jobs" not in told(scribe.facts())


NOTE = """\
2026-08-11T09:00:00Z job 8812301 on n02
an older note
2026-08-11T10:00:00Z job 8812301 on n03
this interpreter can not import slurm_forge: /env/bin/python
Traceback (most recent call last):
  File "<string>", line 1, in <module>
ModuleNotFoundError: No module named 'slurm_forge'\x1b[2J
"""


def test_a_job_that_could_not_even_start_us(scribe: Scribe) -> None:
    requeued(scribe)
    facts = scribe.facts(after=300)
    note = NotStarted(JOB, facts.now - 10, NOTE)
    facts = replace(facts, not_started=(note, replace(note, time=facts.now - 20, text="older")))
    shown = screen(facts)
    assert shown["status"] == (
        "requeued: job 8812301 could not start: on n03: this interpreter can not import "
        "slurm_forge: /env/bin/python ModuleNotFoundError: No module named 'slurm_forge'?[2J"
    )
    assert shown["next"] == (
        "repair the environment that the job starts in (its modules, its Python) | "
        f"then, to continue: scontrol release {JOB}, or {AGAIN}"
    )
    assert "   job 8812301 could not start: on n03: this" in told(facts)
    assert "repair the environment" in told(facts)


SIGNALLED = """\
2026-08-11T10:00:00Z job 8812301 on n1
Slurm ended it (SIGTERM) before it had begun: it was cancelled or preempted, or out of time
"""
BACK = "before it had begun, and is back in the queue: other jobs come first (Priority)"


@pytest.mark.parametrize(
    ("answer", "status", "next_"),
    [
        (
            pending("None", state=JobState.CANCELLED),
            f"cancelled: job {JOB} was cancelled before it had begun",
            f"to continue: {AGAIN}",
        ),
        (
            cancelled_by_accounting(),
            f"cancelled: job {JOB} was cancelled before it had begun (CANCELLED by 0)",
            f"to continue: {AGAIN}",
        ),
        (
            pending("None", state=JobState.PREEMPTED),
            f"stopped: job {JOB} was preempted before it had begun",
            f"to continue: {AGAIN}",
        ),
        (
            pending("Priority", preempt_time=datetime(2026, 8, 11, tzinfo=timezone.utc)),
            f"requeued: job {JOB} was preempted {BACK}",
            "nothing to do: it starts when its turn comes",
        ),
        (
            pending("Priority"),
            f"requeued: SIGTERM ended job {JOB} {BACK}",
            "nothing to do: it starts when its turn comes",
        ),
        (
            pending("None", state=JobState.TIMEOUT),
            f"stopped: SIGTERM ended job {JOB} before it had begun; Slurm reports it as ended "
            "(TIMEOUT)",
            f"to continue: {AGAIN}",
        ),
        (
            pending("None", state=JobState.COMPLETING),
            f"requeued: SIGTERM ended job {JOB} before it had begun; Slurm reports it as "
            "COMPLETING",
            f"check its state in a moment: squeue -j {JOB}",
        ),
        (
            QueueAnswer(JOB, None, answered=False),
            f"stopped: SIGTERM ended job {JOB} before it had begun; whether it was cancelled, "
            "preempted or out of time is unknown",
            f"check whether it is in the queue: squeue -j {JOB}; if it is not: {AGAIN}",
        ),
    ],
)
def test_a_start_that_a_signal_ended_is_no_broken_environment(
    scribe: Scribe, answer: QueueAnswer, status: str, next_: str
) -> None:
    scribe.submitted()
    facts = scribe.facts(after=300)
    note = NotStarted(JOB, facts.now - 10, SIGNALLED)
    facts = replace(facts, not_started=(note,), queue=answer)
    shown = screen(facts)
    assert (shown["status"], shown["next"]) == (status, next_)
    assert next_ in told(facts)
    assert "repair" not in told(facts)
    # What was broken in an earlier start is over; what is broken in the newest one counts.
    broken = replace(note, text=NOTE + SIGNALLED)
    assert screen(replace(facts, not_started=(broken,)))["status"] == status
    broken = replace(note, text=SIGNALLED + NOTE)
    assert "repair the environment" in screen(replace(facts, not_started=(broken,)))["next"]


def test_a_job_that_started_again_after_a_signal_had_ended_its_start(scribe: Scribe) -> None:
    scribe.submitted()
    facts = scribe.facts(after=300)
    since = datetime.fromtimestamp(facts.now - 5, tz=timezone.utc)
    running = pending("None", state=JobState.RUNNING, start_time=since)
    note = NotStarted(JOB, facts.now - 10, SIGNALLED)
    shown = screen(replace(facts, not_started=(note,), queue=running))
    assert f"Slurm has started job {JOB}" in shown["status"]


def test_a_failure_to_start_is_over_once_an_attempt_has_begun_or_a_person_has_asked(
    scribe: Scribe,
) -> None:
    requeued(scribe)
    facts = scribe.facts()
    note = NotStarted(JOB, scribe.now + 10, "no Python")
    assert "no Python" in screen(replace(facts, not_started=(note,)))["status"]
    scribe.later(20).write("cli", ev.UserAsked(verb="requeue", user="x"), launch=1 << 30)
    assert "no Python" not in screen(replace(scribe.facts(), not_started=(note,)))["status"]
    again = replace(note, time=scribe.now + 5)
    assert "no Python" in screen(replace(scribe.facts(), not_started=(again,)))["status"]
    scribe.later(20).begin()
    assert "no Python" not in screen(replace(scribe.facts(), not_started=(again,)))["status"]


def test_a_note_without_words_and_a_finished_run(scribe: Scribe) -> None:
    scribe.submitted()
    note = NotStarted(JOB, scribe.now + 1, " \n")
    shown = screen(replace(scribe.facts(), not_started=(note,)))
    assert shown["status"].endswith("could not start: no reason was recorded")
    scribe.begin()
    scribe.finish(5)
    late = replace(note, time=scribe.now + 100)
    assert screen(replace(scribe.facts(), not_started=(late,)))["status"] == "finished"


def test_where_slurm_does_not_answer_nobody_knows_whether_it_waits(scribe: Scribe) -> None:
    requeued(scribe)
    silent = QueueAnswer(JOB, None, answered=False)
    shown = screen(replace(scribe.facts(after=60), queue=silent))
    told_of = "Slurm does not answer: whether it is queued is unknown"
    assert shown["status"] == f"requeued 60 s ago; {told_of}"
    assert shown["next"] == f"ask again later (squeue -j {JOB})"


def test_a_held_run_is_held_where_slurm_does_not_answer_as_well(scribe: Scribe) -> None:
    held(scribe)
    silent = screen(replace(scribe.facts(after=60), queue=QueueAnswer(JOB, None, answered=False)))
    assert silent == screen(scribe.facts(after=60))


def test_nodes_that_are_reserved_are_looked_into_where_nobody_preempted_it(scribe: Scribe) -> None:
    answer = pending("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_p")
    told_of = why_waiting(answer, again=AGAIN, now=TUESDAY)
    assert told_of.text.startswith("nodes that it needs are down, drained or reserved")
    assert "sinfo -R" in told_of.next


def test_what_no_node_has_is_asked_for_otherwise() -> None:
    told_of = why_waiting(pending("BadConstraints"), again=AGAIN, now=TUESDAY)
    assert f"{AGAIN} --mem …" in told_of.next


# -- a chain of array tasks ------------------------------------------------------------------------


def in_chain(state: JobState = JobState.PENDING, tasks: str = "2-4%1", **more: object) -> JobRecord:
    record = JobRecord(
        job_id=7,
        name="x",
        state=state,
        state_text=state.value,
        array_job_id=7,
        array_task=tasks,
        reason="JobArrayTaskLimit",
        priority=7,
    )
    return replace(record, **more)  # type: ignore[arg-type]


def left_to_the_next_task(scribe: Scribe) -> None:
    scribe.begin(job="7_1", via="sbatch array")
    scribe.resume(0)
    scribe.train(1, 20)
    done = ev.RequeueDone(job="7_1", method=NEXT_TASK, successor="7_2")
    scribe.incident(Cause.TIME_LIMIT, Action.REQUEUE, source="clock", text="EndTime", step=20)
    scribe.write("supervisor", ev.RequeueIntended(job="7_1", method=NEXT_TASK, reason="time_limit"))
    scribe.write("supervisor", done)
    scribe.end("next task")


@pytest.mark.parametrize(
    ("tasks", "words"),
    [("2-4%1", "3 tasks of its array are left"), ("4", "1 task of its array is")],
)
def test_a_chain_says_how_many_tasks_are_left(scribe: Scribe, tasks: str, words: str) -> None:
    left_to_the_next_task(scribe)
    facts = replace(scribe.facts(), queue=QueueAnswer("7_2", in_chain(tasks=tasks)))
    shown = screen(facts)
    assert "requeued" in shown["status"] and words in shown["status"]
    assert shown["next"].startswith("nothing to do")
    assert "continues as task 7_2 of its array" in told(scribe.facts())


def test_the_next_task_of_a_chain_is_not_the_only_one_that_is_left(scribe: Scribe) -> None:
    """Slurm gives it a record of its own once it is changed, or about to start."""
    left_to_the_next_task(scribe)
    answer = QueueAnswer("7_2", in_chain(tasks="2"), tasks=(2, 3, 4))
    assert (
        "3 tasks of its array are left" in screen(replace(scribe.facts(), queue=answer))["status"]
    )


def test_tasks_of_other_runs_are_not_counted(scribe: Scribe) -> None:
    """An array of runs through submitit: each task is another run."""
    scribe.begin(job="7_1", via="submitit forge")
    done = ev.RequeueDone(job="7_1", method="scontrol requeue")
    scribe.write("supervisor", done)
    scribe.end("requeued")
    facts = replace(scribe.facts(), queue=QueueAnswer("7_1", in_chain(tasks="1-4")))
    assert "left" not in screen(facts)["status"]


def test_a_chain_that_has_not_begun_waits_as_a_whole(scribe: Scribe) -> None:
    scribe.submitted("7")
    facts = replace(
        scribe.facts(), queue=QueueAnswer("7", in_chain(tasks="1-4%1", reason="Priority"))
    )
    assert (
        "other jobs come first (Priority); 4 tasks of its array are left"
        in (screen(facts)["status"])
    )


def test_a_held_chain_is_released_by_the_array(scribe: Scribe) -> None:
    scribe.begin(job="7_1", via="sbatch array")
    scribe.resume(0)
    scribe.incident(Cause.APP_ERROR, Action.HOLD, source="rank 0", text="why", step=3)
    scribe.write("supervisor", ev.Held(job="7", restart_count=0, reason="why", confirmed=True))
    scribe.end("held")
    answer = QueueAnswer("7", in_chain(priority=0, reason="JobHeldUser"))
    shown = screen(replace(scribe.facts(), queue=answer))
    assert "held in Slurm's queue as job 7" in shown["status"]
    assert "scontrol release 7, or slurm-forge requeue tiny-gpt" in shown["next"]


def test_a_chain_that_is_used_up_waits_nowhere(scribe: Scribe) -> None:
    scribe.begin(job="7_3", via="sbatch array")
    scribe.resume(0)
    scribe.train(1, 5)
    why = "time_limit; this was the last of 3 tasks, and hill does not let jobs requeue themselves"
    scribe.write("supervisor", ev.Held(job="7_3", restart_count=0, reason=why, queued=False))
    scribe.end("hold")
    assert job_to_ask_about(scribe.facts().records) is None
    shown = screen(scribe.facts())
    assert "this was the last of 3 tasks" in shown["status"]
    assert "in the queue" not in shown["status"]
    assert "to continue: slurm-forge requeue tiny-gpt" in shown["next"]


# -- a run that is running by its journal only -----------------------------------------------------


def ended(state: JobState, **more: object) -> QueueAnswer:
    return pending("None", state=state, exit_code=(0, 9), **more)


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.NODE_FAIL, JobState.COMPLETED])
def test_a_running_run_whose_job_has_ended(scribe: Scribe, state: JobState) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    facts = replace(scribe.facts(after=90), queue=ended(state))
    shown = screen(facts)
    assert shown["status"] == (
        f"stopped: job {JOB} has ended ({state.value}, exit code 0:9), and the journal does not "
        "say why; last heard from 90 s ago"
    )
    assert "slurm-forge requeue tiny-gpt" in shown["next"]
    assert "nothing to do" not in shown["next"]
    assert f"job {JOB} has ended ({state.value}" in told(facts)


def test_a_running_run_that_slurm_does_not_know(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    unknown = QueueAnswer(JOB, None)
    # It may be another cluster's Slurm that was asked: a fresh sign of life is believed.
    assert screen(replace(scribe.facts(after=5), queue=unknown))["status"] == "running: training"
    shown = screen(replace(scribe.facts(after=45), queue=unknown))
    assert f"Slurm no longer knows job {JOB}" in shown["status"]
    assert "slurm-forge requeue tiny-gpt" in shown["next"]


@pytest.mark.parametrize("ahead", [3600, 0, -3600])
@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (ended(JobState.FAILED), "stopped", f"job {JOB} has ended (FAILED"),
        (ended(JobState.CANCELLED), "cancelled", f"job {JOB} was cancelled"),
        (QueueAnswer(JOB, None), "stopped", f"Slurm no longer knows job {JOB}"),
        (pending("None", state=JobState.RUNNING), "running", "training, last heard from 90 s ago"),
    ],
)
def test_how_long_a_run_is_silent_is_no_matter_of_its_nodes_clock(
    scribe: Scribe, answer: QueueAnswer, status: str, words: str, ahead: int
) -> None:
    scribe.ahead = ahead
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    facts = replace(scribe.looked(after=90), queue=answer)
    shown = screen(facts)
    assert shown["status"].startswith(f"{status}: {words}")
    assert take_status(facts).last_seen_age_s == 90
    assert words in told(facts)
    if status == "running":
        assert shown["last heard"] == "90 s ago"
        assert "running   step 20, last heard from 90 s ago" in told(facts)
    else:
        assert f"to continue from the start: {AGAIN}" in shown["next"]
        assert "last heard from 90 s ago" in shown["status"]
        assert f"Next: to continue from the start: {AGAIN}.\n" in told(facts)


@pytest.mark.parametrize("answer", [ended(JobState.FAILED), QueueAnswer(JOB, None)])
def test_a_sign_of_life_that_is_yet_to_come_is_none(scribe: Scribe, answer: QueueAnswer) -> None:
    """The clock of whoever looks is behind that of the files."""
    scribe.begin()
    scribe.resume(0)
    assert screen(replace(scribe.looked(after=-3600), queue=answer))["status"].startswith("stopped")


def test_a_run_goes_on_from_where_it_can(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.save(20)
    facts = replace(scribe.facts(after=90), queue=ended(JobState.FAILED))
    assert f"to continue from the last checkpoint: {AGAIN}" in screen(facts)["next"]
    program = Scribe(scribe.run.path.parent, "program")
    program.attempt, program.launch = 1, 1
    program.write(
        "supervisor",
        ev.AttemptStarted(job=JOB, restart_count=0, nodes=("n01",), host="n01", via="exec"),
    )
    program.write("supervisor", ev.LaunchStarted(world_size=0))
    facts = replace(program.facts(after=90), queue=ended(JobState.FAILED))
    assert "to continue: slurm-forge requeue program" in screen(facts)["next"]


@pytest.mark.parametrize("ahead", [3600, 0, -3600])
def test_a_start_that_fails_is_told_whatever_the_clocks_of_nodes_say(
    scribe: Scribe, ahead: int
) -> None:
    scribe.ahead = ahead
    requeued(scribe)
    note = NotStarted(JOB, scribe.now + 60, "no Python")
    facts = replace(scribe.looked(after=120), not_started=(note,))
    assert "no Python" in screen(facts)["status"]
    scribe.later(120).write("cli", ev.UserAsked(verb="requeue", user="x"), launch=1 << 30)
    assert "no Python" not in screen(replace(scribe.looked(), not_started=(note,)))["status"]
    again = replace(note, time=scribe.now + 5)
    assert "no Python" in screen(replace(scribe.looked(), not_started=(again,)))["status"]
    scribe.later(20).begin()
    assert "no Python" not in screen(replace(scribe.looked(), not_started=(again,)))["status"]


def test_a_running_run_that_slurm_has_put_back_into_the_queue(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    shown = screen(replace(scribe.facts(after=45), queue=pending("Resources")))
    assert shown["status"].startswith(f"requeued: job {JOB} is back in the queue")
    assert "waiting for free nodes" in shown["status"]


def test_a_running_run_whose_job_is_held_says_what_its_comment_says(scribe: Scribe) -> None:
    """On a read-only disk nothing could be written down."""
    scribe.begin()
    scribe.resume(0)
    held = pending(
        "job_requeued_in_held_state",
        comment="slurm_forge: the journal can't be written (Read-only file system)",
    )
    shown = screen(replace(scribe.facts(after=45), queue=held))
    assert shown["status"].startswith(f"held: job {JOB} is held by")
    assert "the journal can't be written (Read-only file system)" in shown["status"]
    assert f"scontrol release {JOB}" in shown["next"]


def test_a_running_run_while_slurm_is_silent(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    silent = QueueAnswer(JOB, None, answered=False)
    shown = screen(replace(scribe.facts(after=45), queue=silent))["status"]
    assert (
        shown == "running: training according to its journal, last heard from 45 s ago; "
        "Slurm does not answer"
    )
    # Nobody to ask: how old the last sign of life is.
    assert "last heard from 2 min ago" in screen(scribe.facts(after=120))["status"]


def test_a_suspended_run(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    answer = pending("None", state=JobState.SUSPENDED)
    assert "suspended by Slurm" in screen(replace(scribe.facts(after=5), queue=answer))["status"]


def test_the_journal_is_read_again_before_it_is_contradicted(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    before = scribe.facts()
    scribe.train(1, 20)
    scribe.finish(20)
    read = iter([before, scribe.facts()])
    facts = with_queue(lambda: next(read), lambda _: ended(JobState.COMPLETED))
    assert take_status(facts).status == "finished"


def test_a_stop_of_a_waiting_run_is_no_launch(scribe: Scribe) -> None:
    requeued(scribe)
    stop = Decision(
        incident_id="1.stop",
        cause=Cause.STOP_REQUESTED,
        action=Action.STOP,
        reason="the file STOP exists",
        plan=RecoveryPlan(),
    )
    scribe.later(60).write("supervisor", ev.DecisionTaken(decision=stop), launch=1 << 30)
    text = told(scribe.facts())
    assert "1 attempt, 1 launch " in text
    assert "requeued\n" in text
    assert "note: the next start did not train: the file STOP exists" in text
    for word in ("1 073 741 824", "1073741824", "relaunched", "ranks unknown", "was lost"):
        assert word not in text
