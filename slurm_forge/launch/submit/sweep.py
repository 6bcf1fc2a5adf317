"""Makes the runs of a sweep and submits them: one array, each task of which is a run of its own.

What is about to be submitted is written down first, so that a sweep is submitted once however often
the command is killed: ``recover_sweep`` finds the job that sbatch has made for it.

An array, because Slurm then keeps the limit by itself, also for tasks that were requeued, and a
task that is held takes nobody's place.  A job each, chained by dependencies, would stop behind the
first one that is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import (
    ConfigError,
    ForgeError,
    RunDirectoryError,
    UnrecordedJobError,
)
from slurm_forge.files import is_file, make_private_directory, write_atomic
from slurm_forge.journal.events import Submitted, UserAsked
from slurm_forge.launch.render.batch_script import render, sweep_script
from slurm_forge.launch.render.sbatch_options import asked_options, leave_out
from slurm_forge.launch.submit.code_version import CodeChoice
from slurm_forge.launch.submit.queued_job import job_of_script
from slurm_forge.launch.submit.submission import (
    create_run,
    keep_successor,
    note,
    run_state,
    untouched,
)
from slurm_forge.person import person
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import Slurm
from slurm_forge.spec import JobSpec
from slurm_forge.spec.run_file import RunFile
from slurm_forge.spec.sweep_runs import (
    SWEEP_FILE,
    SweepArray,
    SweepFile,
    SweepRun,
    SweptJob,
    read_sweep_file,
    write_sweep_file,
)

#: Options that are another for each run whatever its job says.
_OF_EACH_RUN = ("--job-name=", "--output=")


@dataclass(frozen=True, slots=True)
class MadeSweep:
    """A sweep whose runs are made; ``script`` is that of its array."""

    folder: Path
    runs: tuple[RunDirectory, ...]
    script: Path


def refuse_sweep(
    name: str,
    jobs: Sequence[JobSpec],
    *,
    runs: Path,
    site: Site,
    path: Path | str | None,
    slurm: Slurm,
) -> None:
    """``ConfigError`` or ``RunDirectoryError`` for what can't be an array of runs in ``runs``."""
    place = RunDirectory.at(runs / name)
    if place.exists():
        raise RunDirectoryError(
            f"there is a run in {place.path}, which is named as the sweep",
            next_step=f"Change name: in {path or 'the job file'}.",
        )
    again = (
        f"Where its runs are: slurm-forge status {name}.  To continue what is held or stopped: "
        f"slurm-forge requeue {name}.  For another sweep, change name: in {path or 'the job file'}."
    )
    if is_file(place.path / SWEEP_FILE):
        sweep = recover_sweep(place.path, slurm, via="sbatch")
        number = next((array.job for array in sweep.arrays if array.job is not None), None)
        if number is not None:
            raise RunDirectoryError(
                f"the sweep {name} was submitted already, as job {number}", next_step=again
            )
    begun = [each for job in jobs if (each := RunDirectory.at(runs / job.name)).exists()]
    touched = next((run for run in begun if not untouched(run)), None)
    if touched is not None:
        raise RunDirectoryError(f"there is already a run in {touched.path}", next_step=again)
    first = _shared_options(jobs[0], site, runs)
    for job in jobs[1:]:
        other = _shared_options(job, site, runs)
        if other != first:
            differs = sorted(set(first) ^ set(other))
            raise ConfigError(
                f"sweep: {jobs[0].name} and {job.name} ask Slurm for different jobs "
                f"({', '.join(differs)}), and the tasks of an array are alike",
                path=path,
                next_step="Leave that key out of sweep:, and submit a sweep for each of its "
                "values: slurm-forge submit JOB.yaml --set name=… --set KEY=VALUE",
            )


def _shared_options(job: JobSpec, site: Site, runs: Path) -> list[str]:
    lines = asked_options(job, site, RunDirectory.at(runs / job.name))
    return [line for line in lines if not line.startswith(_OF_EACH_RUN)]


def create_sweep(
    name: str,
    jobs: Sequence[SweptJob],
    limit: int | None,
    *,
    runs: Path,
    site: Site,
    submitted_from: Path,
    site_file: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> MadeSweep:
    """Make every run of a sweep, the file that lists them, and the script of their array.

    Of a submission that Slurm has refused, the runs are made anew.  All have the code as it is at
    the first.
    """
    folder = RunDirectory.at(runs / name).path
    made: list[tuple[RunDirectory, RunFile]] = []
    code: CodeChoice | None = None
    for each in jobs:
        run, file = create_run(
            each.layered.job,
            runs=runs,
            site=site,
            submitted_from=submitted_from,
            site_file=site_file,
            code=code,
            say=say if not made else lambda text: None,
        )
        code = CodeChoice(file.code)
        keep_successor(run, render(file, site, run))
        made.append((run, file))
    listed = [
        SweepRun(run=run.name, settings=each.settings)
        for each, (run, _) in zip(jobs, made, strict=True)
    ]
    make_private_directory(folder)
    script = folder / "array.sbatch"
    array = SweepArray(script=str(script), runs=tuple(each.run for each in listed))
    sweep = SweepFile(name=name, limit=limit, runs=tuple(listed), arrays=(array,))
    write_sweep_file(folder, sweep)
    text = sweep_script(name, len(made), limit, site=site, first=made[0][1], runs=folder.parent)
    write_atomic(script, text.encode(), mode=0o700)
    return MadeSweep(folder, tuple(run for run, _ in made), script)


def submit_sweep(made: MadeSweep, slurm: Slurm, *, exclude: Sequence[str] = ()) -> str:
    """Hand the array over; its job id, of which the task N is the run NAME-N.

    ``exclude`` are nodes to leave out, beside those of the job.  ``UnrecordedJobError`` where Slurm
    has taken it and this can't be written down.
    """
    asked = UserAsked(verb="submit", user=person())
    for run in made.runs:
        note(run, asked)
    job = slurm.submit(made.script, leave_out(made.script.read_text(), exclude))
    try:
        sweep = read_sweep_file(made.folder)
        arrays = tuple(each.model_copy(update={"job": job}) for each in sweep.arrays)
        write_sweep_file(made.folder, sweep.model_copy(update={"arrays": arrays}))
        _note_tasks(made.folder, arrays, via="sbatch")
    except (ForgeError, OSError) as error:
        raise UnrecordedJobError(
            f"the sweep was submitted, and this could not be written below "
            f"{made.folder.parent}: {error}",
            job=job,
            next_step="When the cause is removed, give the same command again: it finds the job, "
            "and submits nothing.",
        ) from error
    return job


def recover_sweep(folder: Path, slurm: Slurm, *, via: str) -> SweepFile:
    """Read what ``folder`` lists, and complete it after a command that was killed behind sbatch.

    An array whose job is not known is looked for in the queue, and every run of an array whose job
    is known learns its task.  ``via`` is what submitted it.

    Raises:
        SlurmUnreachableError: Slurm can't be asked.
    """
    sweep = read_sweep_file(folder)
    arrays = tuple(_with_job(each, slurm) for each in sweep.arrays)
    if arrays != sweep.arrays:
        sweep = sweep.model_copy(update={"arrays": arrays})
        write_sweep_file(folder, sweep)
    _note_tasks(folder, arrays, via=via)
    return sweep


def _with_job(array: SweepArray, slurm: Slurm) -> SweepArray:
    record = None if array.job is not None else job_of_script(Path(array.script), slurm)
    if record is None:
        return array
    return array.model_copy(update={"job": str(record.array_job_id or record.job_id)})


def _note_tasks(folder: Path, arrays: Sequence[SweepArray], *, via: str) -> None:
    """Tell each run of a submission its job, unless it knows one."""
    for array in arrays:
        for number, name in enumerate(array.runs if array.job is not None else ()):
            run = RunDirectory.at(folder.parent / name)
            if run.exists() and not run_state(run).job:
                note(run, Submitted(job=array.task(number), via=via))
