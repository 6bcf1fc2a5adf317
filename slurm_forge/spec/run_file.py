"""``run.yaml``: the job as submitted, and what the site and the submitter add to start it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError

from slurm_forge.documents import build, dump, read
from slurm_forge.errors import ConfigError, FormatError, RunDirectoryError
from slurm_forge.files import FOLDERS_OWNER, write_atomic
from slurm_forge.format_version import PACKAGE_VERSION, FormatVersion, refuse_later, to_install
from slurm_forge.lock import exclusive
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

#: Version of the file: see ``slurm_forge.format_version``.
FORMAT = FormatVersion(1, 2)
#: Rewriting the file takes a moment; whoever waits longer waits for something else.
_LOCKED = timedelta(seconds=20)


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

    #: The version of the file, and of the slurm_forge that wrote it.
    format_version: str = str(FORMAT)
    written_by: str = PACKAGE_VERSION
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
    #: Keys of a later minor version, which are written as they were read.
    _later: dict[str, Any] = PrivateAttr(default_factory=dict)

    def to_yaml(self) -> str:
        """The text of ``run.yaml``; reading it gives an equal value."""
        # A run is none of several: who reads the format needs to know no sweeps.
        body = self.model_dump(mode="json", exclude={"job": {"sweep"}})
        return dump(_joined(body, self._later))

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
    """Read ``run.yaml``: only its folder's owner or root may have written it (``UnsafeFileError``).

    Of a later minor version keys that this one does not know are passed over, and kept.

    Raises:
        FormatError: It is of a later major version, or of a later minor one with values that this
            version does not know.
    """
    document = read(path, trusted=True, owner=FOLDERS_OWNER)
    body: Mapping[str, Any] = document.data
    by = body.get("written_by", "")
    try:
        found = FormatVersion.parse(body.get("format_version", "1.0"))
    except ValueError as error:
        raise ConfigError(f"format_version: {error}", path=path, next_step=_RESTORE) from error
    refuse_later(str(path), found, FORMAT, by)
    if found <= FORMAT:
        return build(RunFile, document)
    known, later = _without_later(body)
    try:
        file = build(RunFile, replace(document, data=known))
    except ConfigError as error:
        raise FormatError(
            f"{path} has format {found} and values that this slurm_forge does not know: "
            f"{error.message}",
            next_step=f"Install what wrote it: {to_install(by)}",
        ) from error
    file._later = later  # not a key of the file
    return file


def replace_run_file(run: RunDirectory, was: RunFile, now: RunFile) -> None:
    """Put ``now`` in the place of ``was``, which is what the caller has read.

    Raises:
        RunDirectoryError: Another command has changed the file since.
    """
    with exclusive(run.submissions / "run-yaml.lock", _LOCKED):
        if read_run_file(run.spec_file) != was:
            raise RunDirectoryError(
                f"{run.name} was changed by another command at the same time",
                next_step=f"See what it is now (slurm-forge status {run.name}), then try again.",
            )
        write_atomic(run.spec_file, now.to_yaml().encode())


_RESTORE = "Restore it: the last change of the job is in the folder revisions beside it."


def _without_later(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys that are known at any depth, and the others, each where it was."""
    known: dict[str, Any] = json.loads(json.dumps(body))
    later: dict[str, Any] = {}
    try:
        RunFile.model_validate_json(json.dumps(known), strict=True)
    except ValidationError as error:
        for mistake in error.errors():
            if mistake["type"] == "extra_forbidden":
                _move(known, later, mistake["loc"])
    return known, later


def _move(known: dict[str, Any], later: dict[str, Any], path: Sequence[int | str]) -> None:
    """Take the key at ``path``, in which names of union members are left out, to ``later``."""
    *above, key = path
    for name in above:
        inner = known.get(str(name))
        if isinstance(inner, dict):
            known, later = inner, later.setdefault(str(name), {})
    if key in known:
        later[str(key)] = known.pop(str(key))


def _joined(body: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(body)
    for key, value in later.items():
        own = joined.get(key)
        if isinstance(own, dict) and isinstance(value, dict):
            joined[key] = _joined(own, value)
        else:
            joined[key] = value
    return joined
