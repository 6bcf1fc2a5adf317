"""``submit`` and ``render``: from a job file to a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.completion import site_names
from slurm_forge.cli.options import AsJson
from slurm_forge.cli.start.injected_faults import Inject
from slurm_forge.cli.start.settings import Settings

if TYPE_CHECKING:
    from slurm_forge.site.model import Site
    from slurm_forge.slurm.accounts import QosRecord
    from slurm_forge.slurm.client import Slurm
    from slurm_forge.slurm.records import ConfigRecord, PartitionRecord
    from slurm_forge.spec.layers import Layered, PlaceSetting
    from slurm_forge.spec.sweep_runs import SweptJob

Job = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
SiteName = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="NAME|FILE",
        help="Site (default: SLURM_FORGE_SITE, site: in your settings, Slurm's ClusterName).",
        autocompletion=site_names,
    ),
]
Runs = Annotated[
    Path | None,
    typer.Option(
        "--runs",
        metavar="DIR",
        help="Folder of runs (default: SLURM_FORGE_RUNS, runs: in your settings, ./runs).",
    ),
]

_NOTHING = "nothing was submitted."


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What ``submit --json`` prints: the run, its folder, the job, and the notes.

    For a sweep, ``run`` is its name, ``job`` its array, and ``runs`` are its runs.
    """

    run: str
    path: str
    job: str
    site: str
    notes: tuple[str, ...]
    runs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Chosen:
    site: Site
    because: str
    default_partition: str | None
    cluster: str | None = None
    partitions: tuple[PartitionRecord, ...] = ()
    named_file: str | None = None


def submit(
    job: Job,
    site: SiteName = None,
    runs: Runs = None,
    inject: Inject = None,
    settings: Settings = None,
    json: AsJson = False,
) -> None:
    """Check a job, make its run, submit it to Slurm; of a job with sweep:, all of its runs.

    \b
    Examples:
      slurm-forge submit train.yaml
      slurm-forge submit train.yaml --site generic
      slurm-forge submit train.yaml --set resources.nodes=4 --set args.lr=3e-4
      slurm-forge submit train.yaml --inject term@100:rank0
    """
    from slurm_forge.cli.failure import fail
    from slurm_forge.cli.run_choice import from_here
    from slurm_forge.errors import ForgeError, SlurmUnreachableError, UnrecordedJobError
    from slurm_forge.slurm.client import SubprocessSlurm

    slurm = SubprocessSlurm.of_this_process()
    try:
        submission, follow = _submit(
            job, site, runs, inject or [], settings or [], slurm, quiet=json
        )
    except SlurmUnreachableError as error:
        submitted = error.argv[:1] == ("sbatch",)
        fail(error, _UNKNOWN if submitted and error.returncode != _NOT_THERE else _NOTHING)
    except UnrecordedJobError as error:
        fail(error, f"job {error.job} was submitted.")
    except (ForgeError, OSError) as error:
        fail(error, _NOTHING)
    if json:
        from slurm_forge.report.encoding import to_json

        typer.echo(to_json(submission))
        return
    if submission.runs:
        typer.echo(
            f"submitted {len(submission.runs)} runs as tasks of job {submission.job}.   "
            f"follow: slurm-forge status {follow}\n"
            f"output: {from_here(Path(submission.path))}-N/submissions/"
        )
        return
    typer.echo(
        f"submitted {submission.run} as job {submission.job}.   "
        f"follow: slurm-forge status {follow} --follow\n"
        f"output: {from_here(Path(submission.path))}/submissions/"
    )


#: Shells say this of a command that does not exist; then no job can have been made.
_NOT_THERE = 127
_UNKNOWN = (
    "it is unknown whether the job was submitted: when Slurm answers again, give the same command "
    "again, which submits it only if it is not in the queue."
)


def _submit(
    path: Path,
    site: str | None,
    runs: Path | None,
    inject: list[str],
    settings: list[str],
    slurm: Slurm,
    *,
    quiet: bool,
) -> tuple[Submission, str]:
    from slurm_forge.cli.cluster.excluded_nodes_text import left_out
    from slurm_forge.cli.preparation import check_layered, make, place_of, refuse
    from slurm_forge.cli.run_choice import reference, runs_folder
    from slurm_forge.cli.start.injected_faults import rehearsed
    from slurm_forge.knobs import Knobs, process_environ
    from slurm_forge.launch.render.save_times import usual_saves
    from slurm_forge.launch.render.sbatch_options import asked_options
    from slurm_forge.launch.submit.queued_job import refuse_submitted
    from slurm_forge.launch.submit.submission import submit_script
    from slurm_forge.launch.submit.sweep import refuse_sweep
    from slurm_forge.report.submission.submit_notes import outlook
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.site.model import storage_at
    from slurm_forge.site.variables import forbidden_notes
    from slurm_forge.spec.layers import layered_job
    from slurm_forge.spec.sweep_runs import swept_jobs

    layered = layered_job(path, Knobs.from_environ(process_environ()), settings)
    swept = swept_jobs(layered)
    checked = check_layered(path, swept[0].layered if swept else layered)
    for other in swept[1:]:
        check_layered(path, other.layered)
    if swept and inject:
        raise typer.BadParameter(
            "a sweep takes faults from inject: in its file", param_hint="--inject"
        )
    checked = rehearsed(checked, inject, ranks=checked.job.resources.tasks)
    chosen = _choose(site, slurm, checked.site, need_slurm=True)
    folder = runs_folder(runs, checked.runs)
    place = RunDirectory.at(folder / checked.job.name)
    if swept:
        jobs = [each.layered.job for each in swept]
        refuse_sweep(layered.job.name, jobs, runs=folder, site=chosen.site, path=path, slurm=slurm)
    else:
        refuse_submitted(place, slurm)
    refuse(checked, chosen.site, place)
    out = left_out(checked.job, chosen.site, chosen.cluster, chosen.partitions)
    notes = (
        f"site {chosen.site.name}: {chosen.because}.",
        *checked.doubts,
        *forbidden_notes(chosen.site.name, chosen.site.env, process_environ(), checked.job.env),
        *outlook(
            checked.job,
            chosen.site,
            default_partition=chosen.default_partition,
            storage=storage_at(chosen.site, folder, process_environ()),
            machine=os.uname().machine,
            options=asked_options(checked.job, chosen.site, place),
            where=place_of(checked),
            saves=usual_saves(place, checked.job),
        ),
        *out.notes,
    )
    if not quiet:
        for note in notes:
            typer.echo(note)
    if layered.job.sweep is not None:
        return _submit_sweep(layered, swept, folder, chosen, slurm, notes, out.exclude)
    run, file = make(checked, runs=folder, site=chosen.site, site_file=chosen.named_file)
    job = submit_script(run, file, chosen.site, slurm, exclude=out.exclude)
    submission = Submission(
        run=run.name, path=str(run.path), job=job, site=chosen.site.name, notes=notes
    )
    return submission, reference(run)


def _submit_sweep(
    layered: Layered,
    swept: Sequence[SweptJob],
    folder: Path,
    chosen: _Chosen,
    slurm: Slurm,
    notes: tuple[str, ...],
    exclude: Sequence[str],
) -> tuple[Submission, str]:
    from slurm_forge.cli.run_choice import reference
    from slurm_forge.launch.submit.sweep import create_sweep, submit_sweep
    from slurm_forge.run_directory import RunDirectory

    sweep = layered.job.sweep
    made = create_sweep(
        layered.job.name,
        swept,
        None if sweep is None else sweep.limit,
        runs=folder,
        site=chosen.site,
        submitted_from=Path.cwd(),
        site_file=chosen.named_file,
        say=lambda text: typer.echo(f"note: {text}", err=True),
    )
    submission = Submission(
        run=layered.job.name,
        path=str(made.folder),
        job=submit_sweep(made, slurm, exclude=exclude),
        site=chosen.site.name,
        notes=notes,
        runs=tuple(run.name for run in made.runs),
    )
    return submission, reference(RunDirectory.at(made.folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """What ``render`` prints with ``--json``."""

    run: str
    path: str
    site: str
    script: str
    notes: tuple[str, ...]


def render(
    job: Job,
    site: SiteName = None,
    runs: Runs = None,
    settings: Settings = None,
    json: AsJson = False,
) -> None:
    """Make the run of a job and print its batch script.

    The script starts the run, so the run's folder is created, as by submit; rendering again
    replaces it as long as the run has never been started.

    \b
    Examples:
      slurm-forge render train.yaml
      slurm-forge render train.yaml | sbatch
      slurm-forge render train.yaml --set resources.partition=long
    """
    from slurm_forge.cli.failure import fail
    from slurm_forge.cli.preparation import check, keep_script, make
    from slurm_forge.cli.run_choice import runs_folder
    from slurm_forge.errors import ForgeError
    from slurm_forge.knobs import process_environ
    from slurm_forge.launch.render.batch_script import render as script_of
    from slurm_forge.site.variables import forbidden_notes
    from slurm_forge.slurm.client import SubprocessSlurm

    try:
        checked = check(job, settings or [])
        slurm = SubprocessSlurm.of_this_process()
        chosen = _choose(site, slurm, checked.site, need_slurm=False)
        run, file = make(
            checked,
            runs=runs_folder(runs, checked.runs),
            site=chosen.site,
            site_file=chosen.named_file,
        )
        notes = (
            *checked.doubts,
            *forbidden_notes(chosen.site.name, chosen.site.env, process_environ(), checked.job.env),
        )
        text = script_of(file, chosen.site, run)
        keep_script(run, text)
    except (ForgeError, OSError) as error:
        fail(error, "nothing was rendered.")
    if json:
        from slurm_forge.report.encoding import to_json

        rendering = Rendering(
            run=run.name,
            path=str(run.path),
            site=chosen.site.name,
            script=text,
            notes=notes,
        )
        typer.echo(to_json(rendering))
        return
    for doubt in notes:
        typer.echo(doubt, err=True)
    typer.echo(f"run: {run.path} (site {chosen.site.name}: {chosen.because})", err=True)
    typer.echo(text, nl=False)


def _choose(
    wanted: str | None, slurm: Slurm, setting: PlaceSetting | None, *, need_slurm: bool
) -> _Chosen:
    """The site, completed by what Slurm says; ``setting`` is the site that the settings name."""
    from slurm_forge.cli.run_choice import site_places
    from slurm_forge.errors import SlurmCommandError
    from slurm_forge.site.detection import fill_from_slurm

    places = site_places(setting)
    if wanted is not None or places.preset() is not None:
        places.load(wanted)  # a wrong name is reported before Slurm is asked anything
    try:
        config, partitions = slurm.show_config(), slurm.show_partitions()
    except SlurmCommandError:
        if need_slurm:
            raise
        loaded = places.load(wanted)
        named = places.named_file(wanted)
        return _Chosen(loaded.site, loaded.because, None, named_file=named)
    loaded = places.load(wanted, cluster_name=config.cluster_name)
    default = next((one.name for one in partitions if one.is_default), None)
    qos, default_qos = _qos(slurm, config, default)
    return _Chosen(
        site=fill_from_slurm(loaded.site, config, partitions, qos, default_qos),
        because=loaded.because,
        default_partition=default,
        cluster=config.cluster_name,
        partitions=partitions,
        named_file=places.named_file(wanted),
    )


def _qos(
    slurm: Slurm, config: ConfigRecord, partition: str | None
) -> tuple[tuple[QosRecord, ...], str | None]:
    """All QOS and the one of jobs that name none; nothing where preemption does not go by them."""
    from slurm_forge.person import person
    from slurm_forge.site.preemption import goes_by_qos
    from slurm_forge.site.usable import Person, qos_of
    from slurm_forge.slurm.client import SubprocessSlurm
    from slurm_forge.slurm.survey import survey_accounts

    if not goes_by_qos(config) or not isinstance(slurm, SubprocessSlurm):
        return (), None
    survey = survey_accounts(slurm, person(), config)
    return survey.qos or (), qos_of(survey, Person(), partition)
