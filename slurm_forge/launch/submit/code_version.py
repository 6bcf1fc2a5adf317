"""Which code a run is made of: a snapshot of the git work tree, or the files as they are."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import ForgeError, SnapshotError
from slurm_forge.knobs import process_environ
from slurm_forge.run_directory import RunDirectory
from slurm_forge.source.snapshot import (
    Content,
    Selection,
    changed_files,
    prune_snapshots,
    take_snapshot,
)
from slurm_forge.source.work_tree import GitRevision, WorkTree
from slurm_forge.spec import JobSpec
from slurm_forge.spec.run_file import CodeVersion, RunFile, read_run_file
from slurm_forge.spec.safeguards import CodeMode
from slurm_forge.vocabulary.job_change import CODE, JobChange

#: Changed files that are named.
_SHOWN_FILES = 10
_NO_REVISION = GitRevision("", None)


@dataclass(frozen=True, slots=True)
class CodeChoice:
    """``version`` is None where the files are used as they are.

    ``note`` tells why, if that matters, or what a snapshot does not hold.  ``changed`` are the
    files in which the version differs from the one before.
    """

    version: CodeVersion | None = None
    note: str = ""
    changed: tuple[str, ...] = ()


def choose_code(
    job: JobSpec,
    run: RunDirectory,
    folder: Path,
    *,
    queued: bool,
    before: CodeVersion | None = None,
) -> CodeChoice:
    """Copy the code of a run as its job file wants it.

    Args:
        job: The job.
        run: The run, which need not exist.
        folder: Where the job is submitted from.
        queued: Whether Slurm starts the run, perhaps much later.
        before: The version to compare with.

    Raises:
        SnapshotError: The job file demands a snapshot, and none can be made.
    """
    mode = job.code.mode
    if job.entry is None or mode is CodeMode.LIVE or (mode is CodeMode.AUTO and not queued):
        return CodeChoice()
    try:
        return _snapshot(job, run, folder, before)
    except (SnapshotError, OSError) as error:
        if mode is CodeMode.AUTO:
            reason = error.message if isinstance(error, ForgeError) else str(error)
            return CodeChoice(
                note=f"no snapshot of the code, each start imports the files as they are: {reason}"
            )
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "Make room" if full else "Leave it to be linked with code: {exclude: [FILE]}"
            raise SnapshotError(
                f"the code can't be copied: {error}",
                next_step=f"{advice}, or write code: live to run the files as they are.",
            ) from error
        raise


def _snapshot(
    job: JobSpec, run: RunDirectory, folder: Path, before: CodeVersion | None
) -> CodeChoice:
    tree = WorkTree.around(folder, process_environ())
    if tree is None:
        if job.code.mode is CodeMode.AUTO:
            return CodeChoice()
        raise SnapshotError(
            f"{folder} is in no git work tree of yours",
            next_step="Run git init there and commit, or write code: live to run the files as "
            "they are.",
        )
    selection = Selection(job.code.exclude, job.code.max_size, keep_out=run.path.parent)
    run.make_runs_folder()
    digest, content = take_snapshot(tree, selection, run.code_pool)
    revision = tree.revision() or _NO_REVISION
    version = CodeVersion(
        digest=digest, root=str(tree.root), commit=revision.commit, changes=revision.changes
    )
    changed: tuple[str, ...] = ()
    if before is not None and before.digest != digest:
        changed = changed_files(run.code_pool / before.digest, run.code_pool / digest, content)
    used = {digest, *([] if before is None else [before.digest]), *_used(run.path.parent)}
    prune_snapshots(run.code_pool, used)
    return CodeChoice(version, _outside(tree.root, content), changed)


def _outside(root: Path, content: Content) -> str:
    """That what lies behind links out of the work tree is not part of the snapshot."""
    if not content.outside:
        return ""
    first, count = content.outside[0], len(content.outside)
    links = "a link leads" if count == 1 else f"{count} links lead"
    more = "" if count == 1 else f" and {count - 1} more"
    return f"{links} out of {root}, and what is there when the run starts counts: {first}{more}"


def code_change(file: RunFile, choice: CodeChoice) -> JobChange:
    """That a run which is now made of ``file`` is to be made of the code chosen."""
    live = f"the files in {file.submitted_from}"
    names = ", ".join(choice.changed[:_SHOWN_FILES])
    more = len(choice.changed) - _SHOWN_FILES
    differs = f" (changed: {names}{f' and {more} more' if more > 0 else ''})" if names else ""
    return JobChange(key=CODE, old=str(file.code or live), new=f"{choice.version or live}{differs}")


def _used(runs: Path) -> set[str]:
    """Snapshots that runs in this folder are made of; all there are, where one can't be read."""
    used: set[str] = set()
    for path in runs.glob("*/run.yaml"):
        try:
            code = read_run_file(path).code
        except (ForgeError, OSError):
            with contextlib.suppress(OSError):
                used |= {entry.name for entry in (runs / ".code").iterdir()}
            continue
        if code is not None:
            used.add(code.digest)
    return used


def with_new_code(
    run: RunDirectory, file: RunFile, *, local: bool = False
) -> tuple[RunFile, CodeChoice]:
    """The run with the code as it is now, where the run was submitted from; nothing is written.

    ``local``: it is a run of this machine.

    Raises:
        SnapshotError: No snapshot can be made, or the job file says that there is none.
    """
    mode = file.job.code.mode
    live = mode is CodeMode.LIVE or (local and mode is CodeMode.AUTO and file.code is None)
    if live or file.job.entry is None:
        raise SnapshotError(
            f"{run.name} runs the files in {file.submitted_from} as they are: there is no other "
            "code to take",
            next_step="Its next start imports what is there then: slurm-forge "
            f"{'run' if local else 'requeue'} {run.name}",
        )
    wanted = file.job.code.model_copy(update={"mode": CodeMode.SNAPSHOT})
    job = file.job.model_copy(update={"code": wanted})
    choice = choose_code(job, run, file.folder, queued=True, before=file.code)
    return file.model_copy(update={"code": choice.version}), choice
