"""From a job file with ``sweep:`` to one job for each run, and the file that lists the runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from slurm_forge.documents import build, dotted, dump, read, with_value, without
from slurm_forge.errors import ConfigError
from slurm_forge.files import FOLDERS_OWNER, make_private_directory, write_atomic
from slurm_forge.format_version import PACKAGE_VERSION, FormatVersion, refuse_later
from slurm_forge.spec.job import JobSpec
from slurm_forge.spec.layers import Layered, default_values
from slurm_forge.spec.types import JobSection

#: In the folder that is named as the sweep, beside the folders of its runs.
SWEEP_FILE = "sweep.yaml"
#: Version of that file: see ``slurm_forge.format_version``.
FORMAT = FormatVersion(1, 1)


@dataclass(frozen=True, slots=True)
class SweptJob:
    """The job of one run of a sweep; ``settings`` are what it does not share with the others."""

    settings: dict[str, Any]
    layered: Layered


class SweepRun(JobSection):
    """A run of a sweep: its name in the folder of runs, and its own settings."""

    run: str
    settings: dict[str, Any]


class SweepArray(JobSection):
    """A submission: task N of its job is the N-th of ``runs``; of a single run it may be no array.

    Written before sbatch is called, with no ``job``, and again once sbatch has answered.  If the
    process is killed in between, Slurm knows the job by its ``script``.
    """

    script: str
    runs: tuple[str, ...]
    job: str | None = None
    is_array: bool = True

    def task(self, number: int) -> str:
        """The job of the run at this place; ``ValueError`` where sbatch has not answered."""
        if self.job is None:
            raise ValueError("sbatch has not answered")
        return f"{self.job}_{number}" if self.is_array else self.job


class SweepFile(JobSection):
    """What a sweep consists of."""

    format_version: str = str(FORMAT)
    written_by: str = PACKAGE_VERSION
    name: str
    limit: int | None = Field(default=None, ge=1)
    runs: tuple[SweepRun, ...]
    arrays: tuple[SweepArray, ...] = ()

    def to_yaml(self) -> str:
        """The text of the file."""
        return dump(self.model_dump(mode="json"))


def read_sweep_file(folder: Path) -> SweepFile:
    """Read what ``folder``, which is named as the sweep, lists; keys of a later minor version are
    passed over.

    Raises:
        ConfigError: It is not the file of a sweep.
        FormatError: A later slurm_forge has written it.
        UnsafeFileError: Somebody else than the owner of its folder can have written it.
    """
    path = folder / SWEEP_FILE
    document = read(path, trusted=True, owner=FOLDERS_OWNER)
    try:
        found = FormatVersion.parse(document.data.get("format_version", "1.0"))
    except ValueError as error:
        raise ConfigError(
            f"format_version: {error}", path=path, next_step="Restore the file."
        ) from error
    refuse_later(str(path), found, FORMAT, document.data.get("written_by", ""))
    if found > FORMAT:
        ours = SweepFile.model_fields.keys() & document.data.keys()
        document = replace(document, data={key: document.data[key] for key in ours})
    return build(SweepFile, document)


def write_sweep_file(folder: Path, sweep: SweepFile) -> None:
    """Write what ``folder``, which is named as the sweep, lists; ``folder`` is made if missing."""
    make_private_directory(folder)
    write_atomic(folder / SWEEP_FILE, sweep.to_yaml().encode())


def swept_jobs(layered: Layered) -> tuple[SweptJob, ...]:
    """The job of every run of a sweep, in order; empty where the job file has no ``sweep:``.

    Raises:
        ConfigError: A key is unknown or can't take a value, with the line of the sweep's key.
    """
    sweep = layered.job.sweep
    if sweep is None:
        return ()
    for key in sweep.keys:
        place = layered.document.place_of(key.path)
        if layered.document.written_at(key.path) and str(place).startswith("--set "):
            raise ConfigError(
                f"{dotted(key.path)}: the sweep sets it in every run",
                path=place.source,
                next_step="Leave the option out, or take the key out of sweep:.",
            )
    return tuple(_job(layered, number, dict(point)) for number, point in enumerate(sweep.points()))


def _job(layered: Layered, number: int, point: dict[Any, Any]) -> SweptJob:
    name = f"{layered.job.name}-{number}"
    place = layered.document.place_of(("name",))
    document = without(layered.document, "sweep")
    document = with_value(document, ("name",), name, str(place), default_values())
    for path, value in point.items():
        where = layered.document.place_of(("sweep", dotted(path)))
        try:
            document = with_value(document, path, value, str(where), default_values())
        except ValueError as error:
            raise ConfigError(
                str(error),
                path=where.source,
                line=where.line,
                next_step="To see what can be set: slurm-forge config show JOB.yaml",
            ) from None
    settings = {dotted(path): value for path, value in point.items()}
    return SweptJob(settings, replace(layered, job=build(JobSpec, document), document=document))
