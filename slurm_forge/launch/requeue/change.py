"""A person changes the job of a run that exists: ``run.yaml``, the journal, the DONE marker.

In an order that leaves a consistent run wherever it is cut off.  The old ``run.yaml`` is kept
first.  The new one replaces it whole, and names what was changed: what a resume accepts never
differs from what the ranks are given.  Then comes the journal, and last the DONE marker of a run
that was finished.  Whoever asks again completes what was cut off.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_forge.errors import ConfigError, RunDirectoryError, SlurmCommandError
from slurm_forge.files import is_file, make_private_directory, read_bounded, write_atomic
from slurm_forge.journal import Record, RunState, RunStatus, fold, read_to_fold
from slurm_forge.journal.events import CheckpointCommitted, Forked, JobChanged, Resumed
from slurm_forge.journal.fold import in_order, without_fenced
from slurm_forge.launch.notify.targets import refuse_unsendable
from slurm_forge.launch.render.array_chain import waiting_record
from slurm_forge.launch.render.batch_script import render
from slurm_forge.launch.requeue.reconcile import alone, is_held, known_record
from slurm_forge.launch.submit.queued_job import job_of_script
from slurm_forge.launch.submit.submission import job_script, kept_script, note, own_script, payload
from slurm_forge.person import person
from slurm_forge.recovery.job_changes import GLOBAL_BATCH, merged
from slurm_forge.recovery.policy.remedies import train_further
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import ACTIVE, PENDING_LIKE, TERMINAL, JobState
from slurm_forge.spec import JobSpec
from slurm_forge.spec.run_file import Revision, RunFile, read_run_file, replace_run_file
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.job_change import JobChange

_LARGEST = 1 << 24
#: How long the job of a finished run is waited for, which only ends its processes.
_PATIENCE_S = 30.0
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Changed:
    """The run as it is from now on.  ``notes`` are sentences about what was done to its job."""

    file: RunFile
    notes: tuple[str, ...] = ()


def global_batch_of(records: Iterable[Record]) -> int | None:
    """The samples of one step from the next start on, as far as the journal tells; else None."""
    known: int | None = None
    for record in in_order(without_fenced(records)):
        match record.event:
            case Resumed(global_batch=int(batch)) | Forked(global_batch=int(batch)):
                known = batch
            case JobChanged(changes=changes):
                sizes = [each.new for each in changes if each.key == GLOBAL_BATCH]
                known = int(sizes[-1]) if sizes and sizes[-1] else known
            case _:
                pass
    return known


def changed_later(records: Iterable[Record], checkpoint: CheckpointName) -> tuple[JobChange, ...]:
    """What was changed once the run had trained on from a checkpoint, under the job before.

    A run that begins at the checkpoint has it from there on.
    """
    later: tuple[JobChange, ...] = ()
    is_there = False
    for record in in_order(without_fenced(records)):
        match record.event:
            case CheckpointCommitted(name=name):
                is_there = is_there or name == str(checkpoint)
            case JobChanged(changes=changes, step=int(step)) if is_there and step > checkpoint.step:
                later = merged(later, changes)
            case _:
                pass
    return later


def refuse_foreign_script(run: RunDirectory, job: JobSpec) -> None:
    """``ConfigError`` for a run whose job is described elsewhere than in its ``run.yaml``."""
    if is_file(own_script(run)) or (job.entry is None and not kept_script(run)):
        raise ConfigError(
            f"{run.name} is described by the script that calls slurm-forge exec or attach, not by "
            "a job file",
            next_step="Change the command and its options there, and start the script again: it "
            "goes on under the same name.",
        )


def refuse_kept_script(run: RunDirectory, file: RunFile, new: JobSpec, site: Site) -> None:
    """``ConfigError`` where the change needs another batch script, and submitit has made it."""
    if is_file(payload(run)) and _needs_another_script(run, file, new, site):
        raise ConfigError(
            f"{run.name} was submitted by submitit, whose batch script is kept as it is: only what "
            "is not written there can change",
            next_step="For memory, time, partition and nodes to exclude: slurm-forge requeue "
            f"{run.name}.  For the rest, begin a new run at its checkpoint: slurm-forge fork "
            f"{run.name} --name NEW --set KEY=VALUE",
        )


def _needs_another_script(run: RunDirectory, file: RunFile, new: JobSpec, site: Site) -> bool:
    return render(file, site, run) != render(file.model_copy(update={"job": new}), site, run)


def change_run(
    run: RunDirectory,
    file: RunFile,
    new: RunFile,
    changes: Sequence[JobChange],
    *,
    verb: str,
    site: Site,
    slurm: Slurm | None,
) -> Changed:
    """Replace ``run.yaml`` of a run that rests or waits; a finished one is not finished any more.

    A job that waits in the queue is held first, so that it can't start in between; where its batch
    script would be another one it is cancelled, to be submitted anew.  ``slurm`` is None for a run
    of this machine, whose lock the caller holds.  ``RunDirectoryError`` while the run is training.
    """
    refuse_unsendable(new.job.notify)
    onward = f"slurm-forge {'run' if slurm is None else 'requeue'} {run.name}"
    with alone(run):
        if read_run_file(run.spec_file) != file:
            raise RunDirectoryError(
                f"{run.name} was changed by another command at the same time",
                next_step=f"See what it is now (slurm-forge status {run.name}), then try again.",
            )
        records = read_to_fold(run, refresh=True)
        state = fold(records)
        missing = _unreported(state, file)
        reopened = state.status is not RunStatus.FINISHED and state.reopened
        if not changes and not missing and not (run.is_done() and reopened):
            raise ConfigError(
                f"{run.name} has these values already",
                next_step=f"It is finished.  To train further: {train_further(run.name)}"
                if run.is_done()
                else f"To continue it as it is: {onward}",
            )
        notes = () if slurm is None else _set_aside(run, state, file, new.job, site, slurm)
        try:
            for each in missing:
                _tell(run, state, each)
            if changes:
                file = _replaced(run, file, new, changes, verb)
                _tell(run, state, file.revisions[-1])
            if run.is_done():
                run.reopen()
        except OSError as error:
            waits = "" if slurm is None else f"; a job of {run.name} that waited does not start"
            raise RunDirectoryError(
                f"{run.path} can't be written: {error}{waits}",
                next_step="Make room there and type the command again, or let the run go on as it "
                f"is: {onward}",
            ) from error
        return Changed(file, notes)


def report_revisions(run: RunDirectory, file: RunFile, state: RunState) -> None:
    """Write down the revisions of ``run.yaml`` that the journal lacks.

    A change that was cut off between the two takes effect at the next start all the same.
    """
    for each in _unreported(state, file):
        _tell(run, state, each)


def _unreported(state: RunState, file: RunFile) -> list[Revision]:
    # The journal of a fork begins with its own revision: earlier ones are its parent's.
    return [each for each in file.revisions if each.number > state.revision]


def _replaced(
    run: RunDirectory, was: RunFile, file: RunFile, changes: Sequence[JobChange], verb: str
) -> RunFile:
    """Keep the present ``run.yaml``, and put ``file`` with one more revision in its place."""
    number = max((each.number for each in file.revisions), default=0) + 1
    revision = Revision(number=number, verb=verb, user=person(), changes=tuple(changes))
    now = file.model_copy(update={"revisions": (*file.revisions, revision)})
    kept = run.revision(number)
    make_private_directory(kept.parent)
    write_atomic(kept, read_bounded(run.spec_file, _LARGEST))
    replace_run_file(run, was, now)
    return now


def _tell(run: RunDirectory, state: RunState, revision: Revision) -> None:
    note(
        run,
        JobChanged(
            verb=revision.verb,
            user=revision.user,
            revision=revision.number,
            changes=revision.changes,
            step=state.committed_step,
            reopened=run.is_done(),
        ),
    )


def _set_aside(
    run: RunDirectory, state: RunState, file: RunFile, new: JobSpec, site: Site, slurm: Slurm
) -> tuple[str, ...]:
    """See to it that no job of the run reads its ``run.yaml`` while it is replaced."""
    record = _after_its_end(run, state.job, slurm)
    if record is None or record.state in TERMINAL:
        record = job_of_script(job_script(run), slurm) or record
    if record is None or record.held or record.state in TERMINAL:
        record = waiting_record(state.job, file.job.chain, slurm) or record
    if record is None or record.state in TERMINAL:
        return ()
    if record.state not in PENDING_LIKE and not is_held(record):
        if record.state is JobState.COMPLETING and state.status.is_at_rest:
            return ()  # only its processes are left to end
        raise _is_training(run, record)
    if file.job.chain is not None:
        array = record.job_ref.partition("_")[0]
        slurm.cancel_waiting(array)
        return (f"the tasks of array {array} that waited are cancelled",)
    job = record.job_ref
    if not is_held(record):
        try:
            slurm.hold(job)
        except SlurmCommandError:
            now = slurm.show_job(job)
            if now is not None and now.state in ACTIVE:
                raise _is_training(run, now) from None
            raise
        now = slurm.show_job(job)
        if now is not None and now.state in ACTIVE:
            raise _is_training(run, now)
    if not _needs_another_script(run, file, new, site):
        return ()
    slurm.cancel_waiting(job)
    return (f"job {job}, which waited with the old batch script, is cancelled",)


def _after_its_end(run: RunDirectory, job: str, slurm: Slurm) -> JobRecord | None:
    """What Slurm knows of the job; of a run that is finished, once its job has ended, too."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        record = known_record(job, slurm)
        if not run.is_done() or record is None or record.state not in ACTIVE:
            return record
        if time.monotonic() >= deadline:
            raise RunDirectoryError(
                f"{run.name} is finished, and job {record.job_ref} has not ended yet "
                f"({record.state.value})",
                next_step="Try again when squeue does not list it any more.",
            )
        time.sleep(_LOOK_EVERY_S)


def _is_training(run: RunDirectory, record: JobRecord) -> RunDirectoryError:
    return RunDirectoryError(
        f"{run.name} runs as job {record.job_ref}, and a run that is training can't be changed",
        next_step=f"Let it save and stop first: slurm-forge stop {run.name}; when it has ended, "
        "try again.",
    )
