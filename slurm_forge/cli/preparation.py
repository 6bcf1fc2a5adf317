"""From a job file to a run directory that can be started: checked first, made last."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from slurm_forge.documents import Document, KeyPath, SourcePlace
from slurm_forge.errors import ConfigError, RunDirectoryError, SnapshotError
from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.launch.render.batch_script import refuse_traps
from slurm_forge.launch.render.sbatch_options import asked_options, job_request
from slurm_forge.launch.submit.submission import (
    create_run,
    job_script,
    keep_successor,
    untouched,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.rules import Severity, findings
from slurm_forge.spec import JobSpec
from slurm_forge.spec.entry import check_entry
from slurm_forge.spec.layers import Layered, PlaceSetting, layered_job
from slurm_forge.spec.resources import key_of_option
from slurm_forge.spec.run_file import RunFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A job that nothing was found wrong with; ``doubts`` are sentences for the user."""

    job: JobSpec
    path: Path
    doubts: tuple[str, ...]
    #: What was written, and where: in the job file, the settings below it and the options above.
    document: Document
    #: Which site and which folder of runs the settings name.
    site: PlaceSetting | None = None
    runs: PlaceSetting | None = None


def check(path: Path, settings: Sequence[str] = ()) -> Checked:
    """Read a job file and look at everything that can be seen without starting it.

    It lies over the project's and the user's settings, and under ``settings`` (``--set``).
    """
    layered = layered_job(path, Knobs.from_environ(process_environ()), settings)
    if layered.job.sweep is not None:
        raise ConfigError(
            "sweep: this file describes several runs, and only slurm-forge submit takes it",
            path=path,
            line=layered.document.line_of(("sweep",)),
            next_step="Try one run of it: --set sweep=null, with --set KEY=VALUE for the keys of "
            "the sweep.",
        )
    return check_layered(path, layered)


def check_layered(path: Path, layered: Layered) -> Checked:
    """As ``check``, for a job that has been read."""
    job = layered.job
    doubts = fallback_doubts(job)
    if job.entry is not None:
        try:
            doubts = (*check_entry(job.entry, Path.cwd(), path, list(job.args)), *doubts)
        except ConfigError as error:
            raise _placed(error, layered.document) from None
    return Checked(
        job=job,
        path=path,
        doubts=doubts,
        document=layered.document,
        site=layered.site,
        runs=layered.runs,
    )


def fallback_doubts(job: JobSpec) -> tuple[str, ...]:
    """Doubts whether checkpoints can go to the job's ``fallback``, as seen from this machine."""
    folder = job.checkpoint.fallback
    if folder is None:
        return ()
    there = next(each for each in (Path(folder), *Path(folder).parents) if os.path.lexists(each))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return ()
    why = "is not a directory" if not there.is_dir() else "can't be written to by you"
    return (
        f"checkpoint.fallback: on this machine {there} {why}; unless the nodes differ, "
        f"make {folder} a directory that you can write to",
    )


def _placed(error: ConfigError, document: Document) -> ConfigError:
    """The same with the line of the key that its message begins with."""
    key = tuple(error.message.partition(":")[0].split("."))
    place = document.place_of(key)
    return ConfigError(
        error.message,
        path=place.source or error.path,
        line=place.line,
        next_step=error.next_step,
    )


def make(
    checked: Checked, *, runs: Path, site: Site, site_file: str | None = None, queued: bool = True
) -> tuple[RunDirectory, RunFile]:
    """Make the run, or renew one that was made and never started (a refused submission).

    ``queued``: Slurm starts it, perhaps much later.
    """
    run = RunDirectory.at(runs / checked.job.name)
    # What is refused is refused before anything is made.
    refuse(checked, site, run)
    refuse_traps(site.setup, f"the setup of the site {site.name}")
    refuse_traps(checked.job.setup, "setup")
    if run.exists() and not untouched(run):
        raise RunDirectoryError(
            f"there is already a run in {run.path}",
            next_step=f"Its batch script: {job_script(run)}.  To continue it: slurm-forge requeue "
            f"{run.name}.  To train it further, or with other values: slurm-forge extend or "
            f"slurm-forge change {run.name} --set KEY=VALUE.  For another run, change name: in "
            f"{checked.path}, or begin at a checkpoint of this one: slurm-forge fork {run.name}.",
        )
    try:
        return create_run(
            checked.job,
            runs=runs,
            site=site,
            submitted_from=Path.cwd(),
            site_file=site_file,
            queued=queued,
            say=lambda text: typer.echo(f"note: {text}", err=True),
        )
    except SnapshotError as error:  # the job file asks for one
        place = checked.document.place_of(("code",))
        raise SnapshotError(f"{place}: code: {error.message}", next_step=error.next_step) from error


def refuse(checked: Checked, site: Site, run: RunDirectory) -> None:
    """``ConfigError`` for what the site's rules refuse of a job, with the lines of its file."""
    lines = asked_options(checked.job, site, run)
    problems = findings(job_request(checked.job, site, lines), site)
    errors = [each for each in problems if each.severity is Severity.ERROR]
    if not errors:
        return
    places = [_place(checked, each.option) for each in errors]
    more = [
        str(ConfigError(each.message, path=place.source, line=place.line))
        for each, place in zip(errors[1:], places[1:], strict=True)
    ]
    raise ConfigError(
        "\n".join([errors[0].message, *more]),
        path=places[0].source,
        line=places[0].line,
        next_step=errors[0].advice,
    )


def place_of(checked: Checked) -> Callable[[str], str]:
    """Gives the ``FILE:LINE`` that asks for an sbatch option; empty where none does."""

    def place(option: str) -> str:
        key = _key_there(checked, option)
        return "" if key is None else str(checked.document.place_of(key))

    return place


def _place(checked: Checked, option: str | None) -> SourcePlace:
    """Where the key is; of a key that is missing, where the section is that it belongs to."""
    key = None if option is None else _key_there(checked, option) or key_of_option(option)
    return SourcePlace(str(checked.path)) if key is None else checked.document.place_of(key)


def _key_there(checked: Checked, option: str) -> KeyPath | None:
    gpus = ("gpus-per-node", "gpus-per-task", "gpus", "gres")
    for each in gpus if option in gpus else (option,):
        key = key_of_option(each)
        if checked.document.written_at(key) is not None:
            return key
    return None


def keep_script(run: RunDirectory, text: str) -> Path:
    """Write the batch script where a successor job is submitted from."""
    keep_successor(run, text)
    return job_script(run)
