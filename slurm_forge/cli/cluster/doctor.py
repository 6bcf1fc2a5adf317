"""``doctor``: what this cluster will do to a run, and whether the site file agrees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.completion import site_names

if TYPE_CHECKING:
    from slurm_forge.cli.preparation import Checked
    from slurm_forge.launch.render.prediction import PreemptionForecast
    from slurm_forge.report.doctor.sections import (
        PlaceShown,
        Remark,
        ReportSection,
    )
    from slurm_forge.site.comparing import SiteDifference
    from slurm_forge.site.loading import LoadedSite
    from slurm_forge.slurm.survey import Question, Survey
    from slurm_forge.spec import JobSpec

_PROBLEMS = 1
_COULD_NOT_LOOK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What ``doctor --json`` prints."""

    site: str
    site_file: str
    cluster: str | None
    slurm_version: str | None
    questions: tuple[Question, ...]
    differences: tuple[SiteDifference, ...]
    places: tuple[PlaceShown, ...]
    save_every_s: float
    sections: tuple[ReportSection, ...]


def doctor(
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="[JOB.yaml]",
            help="A job file: what happens to that job (default: to jobs of every partition).",
            show_default=False,
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            "--site",
            metavar="NAME|FILE",
            help="The site file to compare with (default: SLURM_FORGE_SITE, Slurm's ClusterName).",
            autocompletion=site_names,
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "-p", help="Only jobs in this partition.")
    ] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Jobs of this QOS.")] = None,
    account: Annotated[
        str | None, typer.Option("--account", "-A", help="Jobs of this account.")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs", metavar="DIR", help="Folder of runs (default: SLURM_FORGE_RUNS, ./runs)."
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Submit a job of about a minute and watch it.")
    ] = False,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=2, help="For --live: 1 or 2 nodes.")
    ] = 1,
    requeue_too: Annotated[
        bool,
        typer.Option("--requeue-too", help="For --live: also time a requeue of the job."),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="For --live: skip Slurm's own warning signal, which takes a minute."
        ),
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="For --live: keep its folder.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")] = False,
) -> None:
    """What this cluster does to a run, where the site file disagrees, and the storage.

    Exit status: 0 all is well, 1 there are problems, 2 it could not check.

    \b
    Examples:
      slurm-forge doctor
      slurm-forge doctor train.yaml
      slurm-forge doctor --partition preempt --json
      slurm-forge doctor --live --partition preempt
    """
    if live:
        from slurm_forge.cli.cluster.doctor_live import examine_live

        status = examine_live(
            job,
            site_name=site,
            partition=partition,
            qos=qos,
            account=account,
            runs=runs,
            nodes=nodes,
            requeue_too=requeue_too,
            keep=keep,
            quick=quick,
            as_json=json,
        )
        raise typer.Exit(status)
    checkup = _examine(job, site, partition, qos, account, runs)
    if json:
        from slurm_forge.report.encoding import to_json

        typer.echo(to_json(checkup))
    else:
        from slurm_forge.report.doctor.doctor_text import doctor_text

        typer.echo(doctor_text(checkup.sections), nl=False)
    status = _status(checkup)
    if status:
        raise typer.Exit(status)


def _examine(
    job: Path | None,
    site: str | None,
    partition: str | None,
    qos: str | None,
    account: str | None,
    runs: Path | None,
) -> Checkup:
    from slurm_forge.cli.cluster import cluster_survey as examining
    from slurm_forge.cli.run_choice import (
        from_here,
        runs_folder,
        site_places,
    )
    from slurm_forge.launch.render.prediction import (
        ForecastRequest,
        foreseen,
    )
    from slurm_forge.recovery.policy.save_interval import advised_interval
    from slurm_forge.report.doctor.sections import (
        place_shown,
        places_section,
        site_section,
    )
    from slurm_forge.report.doctor.slurm_section import (
        machine_section,
        slurm_section,
    )
    from slurm_forge.report.doctor.storage_section import (
        checkpoint_section,
        storage_section,
    )
    from slurm_forge.site.comparing import compare, unchecked
    from slurm_forge.site.loading import GENERIC

    checked = None if job is None else _read(job)
    wanted = None if checked is None else checked.job
    survey = examining.look_at_slurm()
    config = survey.config
    cluster = None if config is None else config.cluster_name
    loaded = site_places(None if checked is None else checked.site).load(site, cluster_name=cluster)
    folder = runs_folder(runs, None if checked is None else checked.runs)
    earlier = examining.look_at_runs(folder)
    who = examining.who(account or (None if wanted is None else wanted.resources.account))
    places = foreseen(
        survey,
        loaded.site,
        who,
        ForecastRequest(job=wanted, partition=partition, qos=qos, save=earlier.save),
    )
    differences = compare(loaded, survey)
    advice = advised_interval(earlier.states, now=examining.now())
    of_job = None if wanted is None else wanted.name
    about_job = () if wanted is None else _job_section(wanted, loaded, survey, folder, places)
    sections: tuple[ReportSection, ...] = (
        machine_section(examining.look_at_machine(), slurm_answers=config is not None),
        slurm_section(survey),
        site_section(
            loaded.site.name,
            from_here(loaded.path),
            loaded.because,
            differences=differences,
            unchecked=unchecked(loaded.site),
            compared=config is not None,
            described=loaded.site.name != GENERIC,
        ),
        *about_job,
        places_section(places, of_job=of_job),
        storage_section(examining.look_at_storage(folder, loaded.site, earlier.checkpoint)),
        checkpoint_section(advice, places),
    )
    return Checkup(
        site=loaded.site.name,
        site_file=str(loaded.path.absolute()),
        cluster=cluster,
        slurm_version=None if config is None else config.version,
        questions=survey.questions,
        differences=differences,
        places=tuple(map(place_shown, places)),
        save_every_s=advice.every.total_seconds(),
        sections=sections,
    )


def _read(job: Path) -> Checked:
    from slurm_forge.cli.preparation import check

    return check(job)


def _job_section(
    job: JobSpec,
    loaded: LoadedSite,
    survey: Survey,
    folder: Path,
    places: tuple[PreemptionForecast, ...],
) -> tuple[ReportSection, ...]:
    """What the site's rules and Slurm's limits say of the job file."""
    import os

    from slurm_forge.launch.render.sbatch_options import asked_options, job_request
    from slurm_forge.recovery.live_findings import Mark
    from slurm_forge.report.doctor.sections import Remark, ReportSection
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.site.detection import fill_from_slurm
    from slurm_forge.site.rules import Severity, findings

    site = loaded.site
    qos = places[0].qos if places else None  # none where the partition's name is no name
    if survey.config is not None:
        site = fill_from_slurm(site, survey.config, survey.partitions or (), survey.qos or (), qos)
    options = asked_options(job, site, RunDirectory.at(folder / job.name))
    default = next((each.name for each in survey.partitions or () if each.is_default), None)
    request = job_request(job, site, options, default_partition=default, machine=os.uname().machine)
    marks = {Severity.ERROR: Mark.PROBLEM, Severity.WARNING: Mark.WARNING}
    lines: list[Remark] = [
        Remark(marks.get(each.severity, Mark.NOTE), each.message, each.advice or "")
        for each in findings(request, site)
    ]
    return (ReportSection("the job", job.name, tuple(lines)),) if lines else ()


def _status(checkup: Checkup) -> int:
    from slurm_forge.recovery.live_findings import Mark

    if checkup.cluster is None:
        return _COULD_NOT_LOOK
    marks = {line.mark for section in checkup.sections for line in section.told}
    return _PROBLEMS if Mark.PROBLEM in marks else 0
