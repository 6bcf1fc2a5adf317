"""A new run that begins at a checkpoint of another one, with its history in its own journal.

It is made beside its place and moved there whole: no run is ever found without the checkpoint that
it was to begin at.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_forge.errors import RunDirectoryError
from slurm_forge.files import fsync_directory
from slurm_forge.journal import JournalWriter, RunState
from slurm_forge.journal.events import (
    CheckpointCommitted,
    CheckpointJudged,
    Forked,
    JobChanged,
    Note,
)
from slurm_forge.journal.file import NO_LAUNCH
from slurm_forge.launch.notify.targets import refuse_unsendable
from slurm_forge.launch.submit.code_version import CodeChoice, choose_code, code_change
from slurm_forge.launch.submit.submission import note
from slurm_forge.person import person
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import JobSpec
from slurm_forge.spec.run_file import Revision, RunFile, name_fallback
from slurm_forge.store.adoption import FORKED, Adopted, adopt
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.job_change import JobChange
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.trust import Trust

#: How the name of a run begins that is being made.
_STAGE = ".fork-"
_ABANDONED_S = 86400.0
_READ_BACK = "every block was read back when the run was forked"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """What to begin at, what of it is left behind (``fresh``), and the job of the new run.

    ``global_batch`` is the batch size of the other run, where it is known.  ``new_code``: the new
    run is made of the code as it is now, not of the snapshot that the other one has.  ``local``:
    the new run is to be started on this machine, as the other one was.
    """

    checkpoint: CheckpointName
    job: JobSpec
    changes: tuple[JobChange, ...] = ()
    fresh: tuple[str, ...] = ()
    global_batch: int | None = None
    new_code: bool = False
    local: bool = False


def fork_run(
    parent: RunDirectory, file: RunFile, state: RunState, request: ForkRequest, *, runs: Path
) -> tuple[RunDirectory, RunFile]:
    """Make the run ``runs/NAME``; the parent is only read, and may be training.

    ``RunDirectoryError`` where there is a run of that name, CheckpointRejectedError where the
    checkpoint is damaged; then nothing was made.
    """
    refuse_unsendable(request.job.notify)
    child = RunDirectory.at(runs / request.job.name)
    if os.path.lexists(child.path):
        raise _taken(child)
    child.make_runs_folder()
    _remove_abandoned(child.path.parent)
    made = RunDirectory.at(child.path.parent / f"{_STAGE}{child.name}-{secrets.token_hex(4)}")
    number = max((each.number for each in file.revisions), default=0) + 1
    code = _code(child, file, request)
    changes = request.changes
    if file.code is not None and code.version != file.code:
        changes = (*changes, code_change(file, code))
    revision = Revision(number=number, verb=FORKED, user=person(), changes=changes)
    now = file.with_job(request.job).model_copy(
        update={
            "revisions": (*file.revisions, revision),
            "fallback_name": name_fallback(request.job),
            "old_fallbacks": (),
            "code": code.version,
        }
    )
    try:
        made.create(now.to_yaml().encode())
        adopted = adopt(
            file.open_store(parent),
            request.checkpoint,
            CheckpointStore(made.checkpoints, request.job.name),
            fresh=request.fresh,
        )
        _write_history(made, parent, state, request, adopted, revision)
        try:
            os.rename(made.path, child.path)  # noqa: PTH104
        except OSError as error:
            if os.path.lexists(child.path):  # another command was as fast
                raise _taken(child) from error
            raise
    except BaseException:
        shutil.rmtree(made.path, ignore_errors=True)
        raise
    fsync_directory(child.path.parent)
    if code.note:
        note(child, Note(text=code.note))
    note(parent, Note(text=f"forked: {child.name} begins at {request.checkpoint}"))
    return child, now


def _taken(child: RunDirectory) -> RunDirectoryError:
    return RunDirectoryError(
        f"there is already something in {child.path}",
        next_step="Choose another name for the new run: --name OTHER",
    )


def _remove_abandoned(runs: Path) -> None:
    """Delete what forks that were killed have left: none takes as long as those are old."""
    for left in runs.glob(f"{_STAGE}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)


def _code(child: RunDirectory, file: RunFile, request: ForkRequest) -> CodeChoice:
    if request.job.code == file.job.code and not request.new_code:
        return CodeChoice(file.code)  # with nothing changed it computes what the other run would
    queued = not request.local or file.code is not None
    return choose_code(request.job, child, file.folder, queued=queued, before=file.code)


def _write_history(
    made: RunDirectory,
    parent: RunDirectory,
    state: RunState,
    request: ForkRequest,
    adopted: Adopted,
    revision: Revision,
) -> None:
    manifest = adopted.manifest
    base = str(manifest.name)
    journal = JournalWriter(made, attempt=0, writer="cli", launch=NO_LAUNCH)
    try:
        journal.write(
            Forked(
                parent=str(parent.path),
                checkpoint=str(request.checkpoint),
                digest=adopted.digest,
                step=request.checkpoint.step,
                base=base,
                user=revision.user,
                fresh=request.fresh,
                global_batch=request.global_batch,
                plan=_inherited(state.plan, request.fresh),
                local=request.local,
            )
        )
        journal.write(
            CheckpointCommitted(
                name=base,
                step=manifest.step,
                reason=FORKED,
                seconds=0.0,
                size=manifest.size,
                findings=manifest.findings,
            )
        )
        if not manifest.findings:
            journal.write(CheckpointJudged(name=base, trust=Trust.VERIFIED, reason=_READ_BACK))
        journal.write(
            JobChanged(
                verb=revision.verb,
                user=revision.user,
                revision=revision.number,
                changes=revision.changes,
                step=manifest.step,
            )
        )
    finally:
        journal.close()


def _inherited(plan: RecoveryPlan, fresh: Sequence[str]) -> RecoveryPlan:
    """What of the parent's plan is part of what is computed; what it asks of Slurm is not."""
    if "data" in fresh:
        return RecoveryPlan(micro_batch=plan.micro_batch)
    kept = RecoveryPlan(
        micro_batch=plan.micro_batch,
        skipped=plan.skipped,
        reseeded=0 if "rng" in fresh else plan.reseeded,
    )
    if "optimizer" in fresh:
        return kept
    return replace(
        kept,
        lr_factor=plan.lr_factor,
        lr_from_step=plan.lr_from_step,
        lr_ramp_steps=plan.lr_ramp_steps,
    )
