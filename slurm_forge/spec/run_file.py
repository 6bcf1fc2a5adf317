"""``run.yaml``: the job as submitted, and what the site and the submitter add to start it."""

from __future__ import annotations

import secrets
from pathlib import Path

from pydantic import Field

from slurm_forge.documents import build, dump, read
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.fields import Bandwidth
from slurm_forge.site.model import EnvironmentSets
from slurm_forge.site.parts import MasterAddress
from slurm_forge.source.snapshot import place_in_snapshot
from slurm_forge.source.work_tree import GitRevision
from slurm_forge.spec.job import JobSpec
from slurm_forge.spec.types import JobSection, PositiveDuration
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.vocabulary.job_change import JobChange


class CodeVersion(JobSection):
    """The snapshot that a run imports its entry from; ``root`` is the work tree it is a copy of."""

    digest: str
    root: str
    commit: str
    changes: str | None = None

    @property
    def revision(self) -> GitRevision:
        """What git said of the work tree."""
        return GitRevision(self.commit, self.changes)

    def __str__(self) -> str:
        changed = "" if self.changes == "none" else " with changes"
        commit = f"{self.commit[:10]}{changed}, " if self.commit else ""
        return f"{commit}snapshot {self.digest[:10]}"


class Revision(JobSection):
    """A change of the job on purpose, in the order in which they were made."""

    number: int
    verb: str
    user: str
    changes: tuple[JobChange, ...] = ()


class RunFile(JobSection):
    """Everything that a later start of the run needs and that nobody may change in between.

    ``submitted_from`` is the folder that relative paths and module names start from, ``python`` the
    interpreter of the ranks.  ``env`` and ``srun_options`` are the site's, and so is when it
    deletes old files where the run lies.  ``env`` is set always, ``on_hang`` in addition after a
    hang, and ``never`` says of variables why they must not be set.
    """

    submitted_from: str
    python: str
    site: str = "generic"
    #: Its file, where it was given by path and can't be found by its name.
    site_file: str | None = None
    socket_interface: str | None = None
    #: Appended to a node's name to reach it over the fast network.
    host_suffix: str | None = None
    #: What torchrun is told of the first node; None is nothing, unless there is a suffix.
    master_address: MasterAddress | None = None
    env: dict[str, str] = Field(default_factory=dict)
    on_hang: dict[str, str] = Field(default_factory=dict)
    never: dict[str, str] = Field(default_factory=dict)
    #: Bytes per second of a large all-reduce where the job runs; None is not known.
    expected_bandwidth: Bandwidth = None
    srun_options: tuple[str, ...] = ()
    purge_after: PositiveDuration | None = None
    purge_basis: str | None = None
    #: Whether a requeued job may start before Slurm's own delay is over.
    shorten_requeue: bool = True
    #: Whether the centre lets this job requeue itself; else it is held where it would.
    self_requeue_allowed: bool = True
    #: What the saves of an earlier run of the kind took; None is not known.
    usual_save: PositiveDuration | None = None
    #: Where the site keeps its node ledger; None is the user's own.
    node_ledger: str | None = None
    #: Processes of a run of this machine, where ``--ranks`` said another number than the job.
    ranks: int | None = Field(default=None, ge=1)
    #: The run's own folder below the job's ``fallback``: another run of that name has another.
    fallback_name: str | None = None
    #: Such folders below an earlier ``fallback``: what was saved there is still read.
    old_fallbacks: tuple[str, ...] = ()
    #: None where the entry is imported from the files as they are.
    code: CodeVersion | None = None
    #: What was changed on purpose since the run was begun; of a fork, since its parent was.
    revisions: tuple[Revision, ...] = ()
    job: JobSpec

    def to_yaml(self) -> str:
        """The text of ``run.yaml``; reading it gives an equal value."""
        return dump(self.model_dump(mode="json"))

    @property
    def sets(self) -> EnvironmentSets:
        """The site's variables."""
        return EnvironmentSets(always=self.env, on_hang=self.on_hang, never=self.never)

    @property
    def changes(self) -> tuple[JobChange, ...] | None:
        """Every change of the job on purpose, oldest first; None where it is as it was begun."""
        if not self.revisions:
            return None
        return tuple(change for revision in self.revisions for change in revision.changes)

    @property
    def only_hold(self) -> str | None:
        """Why the job must not requeue itself; None where it may."""
        if self.self_requeue_allowed:
            return None
        return f"{self.site} does not let jobs requeue themselves here"

    @property
    def fallback(self) -> Path | None:
        """Where checkpoints go that can't be written into the run directory, if anywhere."""
        if self.job.checkpoint.fallback is None or self.fallback_name is None:
            return None
        return Path(self.job.checkpoint.fallback) / self.fallback_name

    @property
    def earlier_fallbacks(self) -> tuple[Path, ...]:
        """Where checkpoints may lie that were written under an earlier job of the run."""
        return tuple(Path(each) for each in self.old_fallbacks)

    def entry_place(self, run: RunDirectory, entry: str) -> tuple[str, Path]:
        """What to look for as ``entry``, and from which folder, in the code that the run uses.

        Raises:
            SnapshotError: The run's snapshot is gone.
        """
        if self.code is None:
            return entry, self.folder
        snapshot = run.code_pool / self.code.digest
        return place_in_snapshot(entry, snapshot, root=Path(self.code.root), folder=self.folder)

    def with_job(self, job: JobSpec) -> RunFile:
        """The same run with another job; a fallback folder that the job leaves is kept in mind."""
        same = job.resources.tasks_per_node == self.job.resources.tasks_per_node
        now = self.model_copy(
            update={
                "job": job,
                "ranks": self.ranks if same else None,
                "fallback_name": self.fallback_name or name_fallback(job),
            }
        )
        known = dict.fromkeys((*self.old_fallbacks, str(self.fallback)))
        left = tuple(each for each in known if each not in ("None", str(now.fallback)))
        return now.model_copy(update={"old_fallbacks": left})

    def open_store(self, run: RunDirectory) -> CheckpointStore:
        """The checkpoints of the run; ``UnsafeFileError`` where others can write among them."""
        return CheckpointStore(
            run.checkpoints, self.job.name, fallback=self.fallback, earlier=self.earlier_fallbacks
        )

    @property
    def folder(self) -> Path:
        """``submitted_from`` as a path."""
        return Path(self.submitted_from)


def name_fallback(job: JobSpec) -> str | None:
    """A name for the run's folder below the job's ``fallback`` that no other run has."""
    return None if job.checkpoint.fallback is None else f"{job.name}-{secrets.token_hex(4)}"


def read_run_file(path: Path) -> RunFile:
    """Read ``run.yaml``: only we or root may be able to write it (``UnsafeFileError``)."""
    return build(RunFile, read(path, trusted=True))
