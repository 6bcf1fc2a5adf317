"""A person asks for a run: let it go on, or carry out what an attempt had to leave open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm_forge.errors import (
    AlreadyFinishedError,
    RunDirectoryError,
    SlurmCommandError,
    SlurmUnreachableError,
)
from slurm_forge.files import is_file, make_private_directory
from slurm_forge.journal import (
    JournalWriter,
    RunState,
    RunStatus,
    fold,
    newest_attempt_in,
    read_to_fold,
)
from slurm_forge.journal.comebacks import FOUND_QUEUED
from slurm_forge.journal.events import (
    DecisionTaken,
    RequeueDone,
    RequeueFailed,
    RequeueIntended,
    UserAsked,
)
from slurm_forge.journal.file import NO_LAUNCH, Record
from slurm_forge.launch.nodes.excluded_nodes import names_in
from slurm_forge.launch.render.array_chain import waiting_record
from slurm_forge.launch.requeue.job_update import (
    ResourceChanges,
    and_without,
    arguments_for,
    arguments_of,
    changed,
    planned,
    update_of,
    without_nodes,
)
from slurm_forge.launch.requeue.requeue import (
    JobRequeuer,
    RequeueOutcome,
    RequeueResult,
)
from slurm_forge.launch.submit.queued_job import job_of_script
from slurm_forge.launch.submit.submission import (
    job_script,
    kept_script,
    note,
    own_script,
    payload,
    renew_run,
    renew_start_file,
    run_state,
    submit_again,
    submit_script,
)
from slurm_forge.lock import exclusive
from slurm_forge.person import person
from slurm_forge.recovery.incident.classify import is_unexplained
from slurm_forge.recovery.policy.remedies import train_further
from slurm_forge.run_directory import Fence, RunDirectory, newest_claim
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import COMMAND_NOT_FOUND, JobUpdate, Slurm
from slurm_forge.slurm.records import JobRecord, is_slurm_job
from slurm_forge.slurm.states import ACTIVE, PENDING_LIKE, TERMINAL, JobState
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision

_AS_IT_IS = ResourceChanges()


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """What was done to bring a run back: ``job`` is where it goes on.

    ``changed`` says whether anything was, ``submitted`` whether it is a new job.
    """

    job: str
    text: str
    changed: bool
    submitted: bool = False


def bring_back(
    run: RunDirectory,
    slurm: Slurm,
    *,
    site: Site,
    file: RunFile,
    exclude: Sequence[str] = (),
    changes: ResourceChanges = _AS_IT_IS,
    unless: Callable[[RunState, JobRecord | None], str | None] | None = None,
) -> ReconcileResult:
    """A person asks for the run to go on: release its job, or submit the run again.

    ``changes`` is kept as what the run asks for from now on; a job that runs can't be given it
    (``RunDirectoryError``).  ``unless`` is asked when nobody else can act any more: a text is why
    nothing is to be done after all.
    Asking twice never makes two jobs on one host.  Where two hosts ask in the same second both may
    submit; then the later start fences the other, and no step counts twice.
    """
    with alone(run):
        if run.is_done():
            raise AlreadyFinishedError(
                f"{run.name} is finished",
                next_step=f"To train further: {train_further(run.name)}.",
            )
        state = run_state(run)
        now = changed(file.job, changes)  # what can't be is told before anything is done
        record = known_record(state.job, slurm)
        if record is None or record.state not in PENDING_LIKE | ACTIVE:
            record = job_of_script(job_script(run), slurm) or record
        # Of a chain each task that has begun has a record of its own.
        over = record is None or record.state is JobState.COMPLETING or record.state in TERMINAL
        if over or (record is not None and record.held):
            record = waiting_record(state.job, file.job.chain, slurm) or record
        if unless is not None and (why := unless(state, record)) is not None:
            return ReconcileResult(state.job, why, changed=False)
        # Over is what Slurm says is over: a state that is not known here may be a live one.
        if record is not None and record.state in TERMINAL:
            record = None
        if record is not None and (is_held(record) or record.state in PENDING_LIKE):
            return _release_or_change(run, state, record, slurm, file, changes)
        ending = record is not None and record.state is JobState.COMPLETING
        if record is not None and not (ending and state.status.is_at_rest):
            job, word = record.job_ref, record.state.value
            if ending:
                return ReconcileResult(
                    job, f"job {job} is ending: try again in a moment", changed=False
                )
            if record.state is JobState.UNKNOWN:
                text = f"job {job} is {record.state_text}: try again in a moment"
                return ReconcileResult(job, text, changed=False)
            if changes:
                raise RunDirectoryError(
                    f"{run.name} runs as job {job}, and a job that runs can't be changed",
                    next_step=f"Let it save and stop first: slurm-forge stop {run.name}; when it "
                    "has ended, try again.",
                )
            return ReconcileResult(job, f"job {job} is {word} already", changed=False)
        if changes:
            file = renew_run(run, file, now, run.spec_file)
        run.stop_file.unlink(missing_ok=True)
        # What the record says has the raises of every decision in it, the last one's too.
        last = known_record(state.job, slurm)
        update = planned(state, file.job, last, slurm, raised=True, also=exclude)
        args = () if update is None else arguments_for(without_nodes(update), file.job)
        if record is not None:
            args = (f"--dependency=afterany:{record.job_ref}", *args)
        args = (*args, *arguments_of(changes, file.job))
        left_out = () if update is None else tuple(update.exclude_nodes or ())
        left_out = (*left_out, *exclude)
        own = is_file(own_script(run))
        if (own or is_file(payload(run))) and kept_script(run):
            if own:  # its relative paths are meant from where it was submitted
                args = (f"--chdir={file.submitted_from}", *args)
            if changes.exclude is not None:
                left_out = (*left_out, *(names_in(file.job.resources.exclude) or ()))
            job = submit_again(run, slurm, exclude=left_out, args=args)
        else:
            job = submit_script(run, file, site, slurm, verb="requeue", exclude=left_out, args=args)
        return ReconcileResult(job, f"submitted as job {job}", changed=True, submitted=True)


def is_held(record: JobRecord) -> bool:
    """Whether a release would let it start: also while what ran in it is still ending."""
    ending = record.state is JobState.COMPLETING and record.priority == 0
    return record.held or ending


def _release_or_change(
    run: RunDirectory,
    state: RunState,
    record: JobRecord,
    slurm: Slurm,
    file: RunFile,
    changes: ResourceChanges,
) -> ReconcileResult:
    """The job waits in the queue: see to it that it starts, and that its start goes on."""
    job = record.waiting_ref
    held = is_held(record)
    goes_on = not held and not state.status.is_at_rest and not run.stop_asked()
    if goes_on and not changes:
        return ReconcileResult(job, f"job {job} is {record.state.value} already", changed=False)
    if changes:
        now = changed(file.job, changes)
        slurm.update_job(job, update_of(changes, now, record))  # what Slurm refuses is not kept
        renew_run(run, file, now, run.spec_file)
        if goes_on:
            return ReconcileResult(
                job, f"changed job {job}, which waits in the queue", changed=True
            )
    renew_start_file(run)
    # Before the release: the start that it leads to must not find the run at rest.
    note(run, UserAsked(verb="requeue", user=person()))
    run.stop_file.unlink(missing_ok=True)
    if not held:
        return ReconcileResult(
            job, f"job {job} waits in the queue, and will continue", changed=True
        )
    try:
        slurm.release(job)
    except SlurmCommandError as error:
        if "permission denied" not in error.stderr.lower():
            raise
        raise RunDirectoryError(
            f"{run.name} waits as job {job}, which an administrator holds",
            next_step=f"Only they can release it: ask them about job {job}.  It continues then.",
        ) from error
    verb = "changed and released" if changes else "released"
    return ReconcileResult(job, f"{verb} job {job}, which was held", changed=True)


#: What a start that nobody asked for leaves as it is.

#: A person waits for the answer.
_PATIENCE = timedelta(seconds=20)


def reconcile(
    run: RunDirectory,
    slurm: Slurm,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
    by_person: bool = True,
) -> ReconcileResult:
    """Carry out an intent that an attempt left open because Slurm did not answer it.

    What the attempt had decided to ask for (memory, nodes, a wait) is asked for now.  A job that
    was cancelled since is left alone; where neither Slurm nor accounting knows it any more, and it
    was never known what it was ended for, only a person brings it back.  Asking twice never makes
    two jobs, as with ``bring_back``.
    """
    with alone(run):
        records = read_to_fold(run, refresh=True)
        state = fold(records)
        if run.is_done() or state.status is RunStatus.FINISHED:
            return ReconcileResult(state.job, "the run is finished", changed=False)
        intent = state.open_intent
        if intent is None:
            return ReconcileResult(state.job, "nothing is open", changed=False)
        claim = newest_claim(run)
        attempt = 0 if claim is None else claim.attempt
        restarts = 0 if claim is None else claim.restart_count
        job = read_run_file(run.spec_file).job
        wait = _wait_answer(state, records, intent, clock())

        def decided() -> JobUpdate | None:
            record = known_record(intent.job, slurm)
            there = () if record is None else names_in(record.excluded_nodes) or ()
            others = sorted(set(there) - set(state.plan.exclude_nodes))
            return and_without(planned(state, job, record, slurm, also=others), others)

        newest = newest_attempt_in(records)
        journal = JournalWriter(run, attempt=newest, writer="cli", launch=NO_LAUNCH)
        journal.advance_clock(records)
        try:
            job_after = _came_back(run, intent.job, restarts, slurm)
            if job_after is not None:
                # Taken although the answer was lost; a second one would end the new start.
                successor = None if job_after.job_ref == intent.job else job_after.job_ref
                event = RequeueDone(job=intent.job, method=FOUND_QUEUED, successor=successor)
                journal.write(event)
                text = f"job {job_after.job_ref} is {job_after.state.value} already"
                if successor is None and job_after.state in PENDING_LIKE:
                    text += _give(job_after.job_ref, decided(), wait, slurm, journal)
                return ReconcileResult(job_after.job_ref, text, changed=False)
            end = _end_of(intent.job, slurm, sure=not by_person)
            if end is JobState.CANCELLED:
                return _stays_cancelled(run, state, intent.job, attempt, journal)
            if end is JobState.COMPLETING and not by_person:
                # A scancel reads the same until the job has ended.
                text = f"job {intent.job} is ending: try again in a moment"
                return ReconcileResult(intent.job, text, changed=False)
            if end is None and not by_person and _is_unexplained(state):
                text = (
                    f"Slurm does not know job {intent.job} any more, and it is unknown whether "
                    f"somebody has cancelled it; to continue: slurm-forge reconcile {run.name}"
                )
                return ReconcileResult(intent.job, text, changed=False)
            job_requeuer = JobRequeuer(
                slurm,
                job=intent.job,
                restart_count=restarts,
                script=kept_script(run),
                journal=journal,
                fence=Fence(run, attempt),
                sleep=sleep,
                patience=_PATIENCE,
            )
            result: RequeueResult = job_requeuer.requeue(
                f"reconcile: {intent.reason}",
                decided,
                wait=wait,
                arguments=lambda: arguments_for(decided(), job),
            )
            if result.outcome is RequeueOutcome.CANCELLED:
                return _stays_cancelled(run, state, intent.job, attempt, journal)
        finally:
            journal.close()
        if result.outcome is RequeueOutcome.PENDING:
            raise RunDirectoryError(
                f"Slurm has not confirmed the requeue yet: {result.text}",
                next_step="Try slurm-forge reconcile again when Slurm answers.",
            )
        return ReconcileResult(run_state(run).job, result.text, changed=True)


def _stays_cancelled(
    run: RunDirectory, state: RunState, job: str, attempt: int, journal: JournalWriter
) -> ReconcileResult:
    """Somebody has cancelled the job since: nothing is open any more."""
    decision = Decision(
        incident_id=f"{attempt}.cancelled",
        cause=Cause.USER_CANCELLED,
        action=Action.STOP,
        reason=f"job {job} was cancelled; it stays cancelled",
        plan=state.plan,
    )
    journal.write(DecisionTaken(decision=decision))
    text = f"job {job} was cancelled since; to continue: slurm-forge requeue {run.name}"
    return ReconcileResult(job, text, changed=False)


def _end_of(job: str, slurm: Slurm, *, sure: bool) -> JobState | None:
    """The job's state, from accounting where the controller does not tell; None: nowhere.

    ``sure``: ``SlurmUnreachableError`` where only accounting can tell, and does not answer.
    """
    record = known_record(job, slurm)
    if record is not None and record.state is not JobState.COMPLETING:
        return record.state
    try:
        rows = [row for row in slurm.accounting(job) if row.step is None]
        # Of a job that is ending accounting may still know no more than that it runs.
        if rows and (record is None or rows[-1].state is JobState.CANCELLED):
            return rows[-1].state
    except SlurmCommandError as error:
        silent = isinstance(error, SlurmUnreachableError) and error.returncode != COMMAND_NOT_FOUND
        if sure and silent and record is None:
            raise
    return None if record is None else record.state


def _is_unexplained(state: RunState) -> bool:
    incidents = state.attempts[-1].incidents if state.attempts else ()
    return bool(incidents) and is_unexplained(incidents[-1][1])


def _wait_answer(
    state: RunState, records: Sequence[Record], intent: RequeueIntended, now: float
) -> timedelta:
    """What is left of the pause that was decided with the intent, counted from then."""
    decisions = [decision for attempt in state.attempts for _, decision in attempt.decisions]
    if not decisions:
        return timedelta(0)
    intended_at = next((each.time for each in reversed(records) if each.event == intent), now)
    return timedelta(seconds=max(0.0, decisions[-1].wait_s - max(0.0, now - intended_at)))


def _give(
    job: str, update: JobUpdate | None, wait: timedelta, slurm: Slurm, journal: JournalWriter
) -> str:
    """Give the waiting job what was decided; what there is to say of it."""
    if wait > timedelta(0):
        update = replace(update or JobUpdate(), start_after=wait)
    if update is None:
        return ""
    try:
        slurm.update_job(job, update)
    except SlurmCommandError as error:
        journal.write(RequeueFailed(job=job, method="scontrol update", reason=str(error)))
        return f", but Slurm refused what recovery had decided: {' '.join(error.stderr.split())}"
    return f", and now asks for {' '.join(update.assignments())}"


def _came_back(run: RunDirectory, job: str, restarts: int, slurm: Slurm) -> JobRecord | None:
    """The start that the intent was for, if Slurm knows it: waiting, begun, or a successor."""
    record = known_record(job, slurm)
    if record is not None and record.state in PENDING_LIKE:
        return record
    if record is not None and record.state in ACTIVE:
        return record if record.restarts > restarts else None
    return job_of_script(job_script(run), slurm)


def known_record(job: str, slurm: Slurm) -> JobRecord | None:
    """What Slurm knows of the job, if it is one of Slurm's."""
    return slurm.show_job(job) if is_slurm_job(job) else None


#: sbatch alone may take two minutes to answer.
_OTHERS = timedelta(minutes=3)


@contextlib.contextmanager
def alone(run: RunDirectory) -> Iterator[None]:
    """One command at a time brings a run of this user's back, on this host."""
    run.refuse_others()
    make_private_directory(run.submissions)
    with exclusive(run.submissions / "coming-back.lock", _OTHERS):
        yield
