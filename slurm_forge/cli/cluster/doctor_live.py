"""``doctor --live``: what a job of a minute sees of this cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from slurm_forge.recovery.live_observations import LiveSeen
    from slurm_forge.recovery.policy.prediction import Prediction
    from slurm_forge.site.model import Site
    from slurm_forge.slurm.survey import Survey
    from slurm_forge.spec import JobSpec

_PROBLEMS = 1
_COULD_NOT_LOOK = 2


def examine_live(
    path: Path | None,
    *,
    site_name: str | None,
    partition: str | None,
    qos: str | None,
    account: str | None,
    runs: Path | None,
    nodes: int,
    requeue_too: bool,
    keep: bool,
    quick: bool,
    as_json: bool,
) -> int:
    """Submit the job, print what it saw, and return the exit status; names as on the command line.

    Ctrl-C, SIGTERM and a closed terminal take the job and the folder away, however often: they are
    only recorded, since one in the middle of sbatch, or of tidying up, would leave a job behind.
    """
    from slurm_forge.cli.cluster.cluster_survey import look_at_slurm
    from slurm_forge.cli.cluster.live_text import live_json, live_text
    from slurm_forge.cli.preparation import check
    from slurm_forge.cli.progress import bar
    from slurm_forge.cli.run_choice import runs_folder, site_places
    from slurm_forge.launch.attempt.stop_request import StopRequest
    from slurm_forge.launch.diagnose.live_check import LiveWish, live_job, look_live
    from slurm_forge.recovery.live_findings import Mark, findings
    from slurm_forge.report.text import clean
    from slurm_forge.slurm.client import SubprocessSlurm

    slurm = SubprocessSlurm.of_this_process()
    checked = None if path is None else check(path)
    wanted = None if checked is None else checked.job
    survey = look_at_slurm(slurm)
    cluster = survey.config.cluster_name if survey.config is not None else None
    places = site_places(None if checked is None else checked.site)
    site = places.load(site_name, cluster_name=cluster).site
    wish = LiveWish(
        job=live_job(wanted, nodes=nodes, partition=partition, qos=qos, account=account),
        site=site,
        runs=runs_folder(runs, None if checked is None else checked.runs),
        python=site.python or sys.executable,
        quick=quick,
        requeue_too=requeue_too,
        keep=keep,
    )
    with StopRequest() as stop, bar("job of doctor") as shown:
        observed = look_live(
            wish,
            slurm,
            say=lambda text: shown.line(clean(text, 400)),
            interrupted=lambda: bool(stop),
        )
    account = account or (None if wanted is None else wanted.resources.account)
    prediction = _prediction(wanted, observed, site, survey, account)
    results = findings(observed, prediction, site)
    if as_json:
        typer.echo(live_json(observed, results, prediction))
    else:
        typer.echo(live_text(observed, results), nl=False)
    if observed.report is None:
        return _COULD_NOT_LOOK
    bad = observed.problem or any(each.mark is Mark.PROBLEM for each in results)
    return _PROBLEMS if bad else 0


def _prediction(
    wanted: JobSpec | None, observed: LiveSeen, site: Site, survey: Survey, account: str | None
) -> Prediction | None:
    """What ``doctor`` says of jobs in the place where the job has run."""
    from slurm_forge.cli.cluster.cluster_survey import who
    from slurm_forge.launch.render.prediction import ForecastRequest, foreseen

    request = ForecastRequest(job=wanted, partition=observed.partition, qos=observed.qos)
    places = foreseen(survey, site, who(account), request)
    return places[0].prediction if places else None
