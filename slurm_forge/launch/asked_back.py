"""A person asks for a run: let it go on, or carry out what an attempt had to leave open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm_forge.errors import AlreadyFinishedError, RunDirectoryError, SlurmCommandError
from slurm_forge.files import make_private_directory
from slurm_forge.journal import JournalWriter, RunState, RunStatus
from slurm_forge.journal.events import RequeueDone, UserAsked
from slurm_forge.launch.ladder import Comeback, Ladder, Taken
from slurm_forge.launch.submission import (
    job_script,
    note,
    payload,
    run_state,
    submit_again,
    submit_script,
)
from slurm_forge.launch.update import arguments_for, update_for
from slurm_forge.lock import exclusive
from slurm_forge.person import person
from slurm_forge.run_directory import Fence, RunDirectory, newest_claim
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import ACTIVE, PENDING_LIKE, JobState
from slurm_forge.spec import JobSpec
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.decision import Action

__all__ = ["Brought", "bring_back", "reconcile"]


@dataclass(frozen=True, slots=True)
class Brought:
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
) -> Brought:
    """A person asks for the run to go on: release its job, or submit the run again.

    Asking twice never makes two jobs on one host.  Where two hosts ask in the same second both may
    submit; then the later start fences the other, and no step counts twice.
    """
    with _alone(run):
        if run.is_done():
            raise AlreadyFinishedError(
                f"{run.name} is finished",
                next_step="Start a new run under another name to train further.",
            )
        state = run_state(run)
        record = _record(state.job, slurm)
        if record is None or record.state not in PENDING_LIKE | ACTIVE:
            record = _successor(run, slurm)
        if record is not None and (_is_held(record) or record.state in PENDING_LIKE):
            return _go_on(run, state, record, slurm)
        ending = record is not None and record.state is JobState.COMPLETING
        if record is not None and not (ending and state.status in _AT_REST):
            job, word = record.job_ref, record.state.value
            if ending:
                return Brought(job, f"job {job} is ending: ask again in a moment", changed=False)
            return Brought(job, f"job {job} is {word} already", changed=False)
        run.stop_file.unlink(missing_ok=True)
        planned, args = _as_planned(state, file.job, slurm)
        if record is not None:
            args = (f"--dependency=afterany:{record.job_ref}", *args)
        left_out = (*planned, *exclude)
        if payload(run).is_file() and job_script(run).is_file():
            job = submit_again(run, slurm, exclude=left_out, args=args)
        else:
            job = submit_script(run, file, site, slurm, verb="requeue", exclude=left_out, args=args)
        return Brought(job, f"submitted as job {job}", changed=True, submitted=True)


def _as_planned(
    state: RunState, job: JobSpec, slurm: Slurm
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes to leave out, and options of sbatch, by which the recovery plan stays in force."""
    decisions = [decision for attempt in state.attempts for _, decision in attempt.decisions]
    if not decisions:
        return (), ()
    # What the record says has the raises of every decision in it, the last one's too.
    now = replace(decisions[-1], action=Action.REQUEUE, plan=state.plan)
    update = update_for(now, job, _record(state.job, slurm))
    if update is None:
        return (), ()
    args = arguments_for(replace(update, exclude_nodes=None), job)
    return tuple(update.exclude_nodes or ()), args


def _is_held(record: JobRecord) -> bool:
    """Whether a release would let it start: also while what ran in it is still ending."""
    ending = record.state is JobState.COMPLETING and record.priority == 0
    return record.held or ending


def _go_on(run: RunDirectory, state: RunState, record: JobRecord, slurm: Slurm) -> Brought:
    """The job waits in the queue: see to it that it starts, and that its start goes on."""
    job = record.job_ref
    held = _is_held(record)
    if not held and state.status not in _AT_REST and not run.stop_file.exists():
        return Brought(job, f"job {job} is {record.state.value} already", changed=False)
    # Before the release: the start that it leads to must not find the run at rest.
    note(run, UserAsked(verb="requeue", user=person()))
    run.stop_file.unlink(missing_ok=True)
    if not held:
        return Brought(job, f"job {job} waits in the queue, and will go on", changed=True)
    try:
        slurm.release(job)
    except SlurmCommandError as error:
        if "permission denied" not in error.stderr.lower():
            raise
        raise RunDirectoryError(
            f"{run.name} waits as job {job}, which an administrator holds",
            next_step=f"Only they can release it: ask them about job {job}.  It will go on then.",
        ) from error
    return Brought(job, f"released job {job}, which was held", changed=True)


#: What a start that nobody asked for leaves as it is.
_AT_REST = frozenset({RunStatus.HELD, RunStatus.STOPPED, RunStatus.CANCELLED})

#: A person waits for the answer.
_PATIENCE = timedelta(seconds=20)


def reconcile(
    run: RunDirectory, slurm: Slurm, *, sleep: Callable[[float], None] = time.sleep
) -> Brought:
    """Carry out an intent that an attempt left open because Slurm did not answer it.

    Asking twice never makes two jobs, as with ``bring_back``.
    """
    with _alone(run):
        state = run_state(run)
        if run.is_done() or state.status is RunStatus.FINISHED:
            return Brought(state.job, "the run is finished", changed=False)
        intent = state.open_intent
        if intent is None:
            return Brought(state.job, "nothing is open", changed=False)
        claim = newest_claim(run)
        attempt = 0 if claim is None else claim.attempt
        restarts = 0 if claim is None else claim.restart_count
        journal = JournalWriter(run, attempt=attempt, writer="cli", launch=1 << 30)
        try:
            found = _came_back(run, intent.job, restarts, slurm)
            if found is not None:
                # Taken although the answer was lost; a second one would end the new start.
                successor = None if found.job_ref == intent.job else found.job_ref
                done = RequeueDone(job=intent.job, method=_FOUND, successor=successor)
                journal.write(done)
                text = f"job {found.job_ref} is {found.state.value} already"
                return Brought(found.job_ref, text, changed=False)
            ladder = Ladder(
                slurm,
                job=intent.job,
                restart_count=restarts,
                script=job_script(run) if job_script(run).is_file() else None,
                journal=journal,
                fence=Fence(run, attempt),
                sleep=sleep,
                patience=_PATIENCE,
            )
            comeback: Comeback = ladder.climb(f"reconcile: {intent.reason}")
        finally:
            journal.close()
        if comeback.taken is Taken.OPEN:
            raise RunDirectoryError(
                f"the intent is still open: {comeback.text}",
                next_step="Try slurm-forge reconcile again when Slurm answers.",
            )
        return Brought(run_state(run).job, comeback.text, changed=True)


_FOUND = "found in the queue"


def _came_back(run: RunDirectory, job: str, restarts: int, slurm: Slurm) -> JobRecord | None:
    """The start that the intent was for, if Slurm knows it: waiting, begun, or a successor."""
    record = _record(job, slurm)
    if record is not None and record.state in PENDING_LIKE:
        return record
    if record is not None and record.state in ACTIVE:
        return record if record.restarts > restarts else None
    return _successor(run, slurm)


def _record(job: str, slurm: Slurm) -> JobRecord | None:
    """What Slurm knows of the job, if it is one of Slurm's."""
    return slurm.show_job(job) if job[:1].isdigit() else None


def _successor(run: RunDirectory, slurm: Slurm) -> JobRecord | None:
    """A job in the queue with the run's script that the journal does not know.

    An sbatch whose answer was lost, or somebody else's on another host, may have made it.
    """
    script = str(job_script(run))
    for entry in slurm.queue(person())[:_LOOKED_AT]:
        if entry.state in PENDING_LIKE | ACTIVE and "[" not in entry.job_ref:
            record = slurm.show_job(entry.job_ref)
            if record is not None and record.command == script:
                return record
    return None


#: One question to Slurm each.
_LOOKED_AT = 100
#: sbatch alone may take two minutes to answer.
_OTHERS = timedelta(minutes=3)


@contextlib.contextmanager
def _alone(run: RunDirectory) -> Iterator[None]:
    """One command at a time brings a run back, on this host."""
    make_private_directory(run.submissions)
    with exclusive(run.submissions / "coming-back.lock", _OTHERS):
        yield
