"""From a job file to a run directory that can be started: checked first, made last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import RunDirectoryError
from slurm_forge.launch.entry_check import check_entry
from slurm_forge.launch.script import options
from slurm_forge.launch.setup_lines import refuse_traps
from slurm_forge.launch.submission import create_run, job_script, keep_successor, untouched
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.spec import JobSpec, load_job
from slurm_forge.spec.run_file import RunFile

__all__ = ["Checked", "check", "keep_script", "make"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A job that nothing was found wrong with; ``doubts`` are sentences for the user."""

    job: JobSpec
    path: Path
    doubts: tuple[str, ...]


def check(path: Path) -> Checked:
    """Read a job file and look at everything that can be seen without starting it."""
    job = load_job(path)
    if job.entry is None:
        return Checked(job=job, path=path, doubts=())
    doubts = tuple(check_entry(job.entry, Path.cwd(), path, list(job.args)))
    return Checked(job=job, path=path, doubts=doubts)


def make(checked: Checked, *, runs: Path, site: Site) -> tuple[RunDirectory, RunFile]:
    """Make the run, or renew one that was made and never started (a refused submission)."""
    run = RunDirectory.at(runs / checked.job.name)
    # What is refused is refused before anything is made.
    options(checked.job, site, run)
    refuse_traps(site.setup, f"the setup of the site {site.name}")
    refuse_traps(checked.job.setup, "setup")
    if run.spec_file.is_file() and not untouched(run):
        raise RunDirectoryError(
            f"a run already lives in {run.path}",
            next_step=f"Choose another name in {checked.path}, or go on with it: "
            f"slurm-forge requeue {run.name}",
        )
    return create_run(checked.job, runs=runs, site=site, submitted_from=Path.cwd())


def keep_script(run: RunDirectory, text: str) -> Path:
    """Write the batch script where a successor job is submitted from."""
    keep_successor(run, text)
    return job_script(run)
