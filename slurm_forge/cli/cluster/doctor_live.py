"""``doctor --live``: what a job of a minute sees of this cluster."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from slurm_forge.cli.preparation import Checked
    from slurm_forge.recovery.live_findings import SiteWords
    from slurm_forge.recovery.live_observations import LiveSeen
    from slurm_forge.recovery.policy.prediction import Prediction
    from slurm_forge.site.model import Site
    from slurm_forge.slurm.survey import Survey
    from slurm_forge.spec import JobSpec

_PROBLEMS = 1
_COULD_NOT_LOOK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """What was asked for on the command line; names as there."""

    job: Path | None = None
    site: str | None = None
    partition: str | None = None
    qos: str | None = None
    account: str | None = None
    runs: Path | None = None
    nodes: int = 1
    requeue_too: bool = False
    keep: bool = False
    quick: bool = False
    json: bool = False


def examine_live(request: LiveRequest) -> int:
    """Submit the job, print what it saw, and return the exit status."""
    from slurm_forge.cli.cluster.cluster_survey import look_at_slurm
    from slurm_forge.cli.cluster.live_text import (
        live_json,
        live_text,
    )
    from slurm_forge.cli.run_choice import (
        runs_folder,
        site_places,
    )
    from slurm_forge.launch.diagnose.live_check import (
        LiveWish,
        live_job,
        look_live,
    )
    from slurm_forge.recovery.live_findings import Mark, findings
    from slurm_forge.report.text import clean
    from slurm_forge.slurm.client import SubprocessSlurm

    slurm = SubprocessSlurm.of_this_process()
    checked = _checked(request.job)
    wanted = None if checked is None else checked.job
    survey = look_at_slurm(slurm)
    cluster = survey.config.cluster_name if survey.config is not None else None
    site_name = None if checked is None else checked.site
    site = site_places(site_name).load(request.site, cluster_name=cluster).site
    job = live_job(
        wanted,
        nodes=request.nodes,
        partition=request.partition,
        qos=request.qos,
        account=request.account,
    )
    wish = LiveWish(
        job=job,
        site=site,
        runs=runs_folder(request.runs, None if checked is None else checked.runs),
        python=site.python or sys.executable,
        quick=request.quick,
        requeue_too=request.requeue_too,
        keep=request.keep,
    )
    with _recorded_signals() as interrupted:
        observed = look_live(
            wish,
            slurm,
            say=lambda text: typer.echo(clean(text, 400), err=True),
            interrupted=interrupted,
        )
    account = request.account or (None if wanted is None else wanted.resources.account)
    prediction = _prediction(wanted, observed, site, survey, account)
    results = findings(observed, prediction, _site_words(site, observed))
    if request.json:
        typer.echo(live_json(observed, results, prediction))
    else:
        typer.echo(live_text(observed, results), nl=False)
    if observed.report is None:
        return _COULD_NOT_LOOK
    bad = observed.problem or any(each.mark is Mark.PROBLEM for each in results)
    return _PROBLEMS if bad else 0


def _checked(path: Path | None) -> Checked | None:
    if path is None:
        return None
    from slurm_forge.cli.preparation import check

    return check(path)


def _prediction(
    wanted: JobSpec | None, observed: LiveSeen, site: Site, survey: Survey, account: str | None
) -> Prediction | None:
    """What ``doctor`` says of jobs in the place where the job has run."""
    from slurm_forge.cli.cluster.cluster_survey import who
    from slurm_forge.launch.render.prediction import (
        ForecastRequest,
        foreseen,
    )

    places = foreseen(
        survey,
        site,
        who(account),
        ForecastRequest(job=wanted, partition=observed.partition, qos=observed.qos),
    )
    return places[0].prediction if places else None


def _site_words(site: Site, observed: LiveSeen) -> SiteWords:
    from slurm_forge.control.interfaces import interface_of
    from slurm_forge.recovery.live_findings import SiteWords

    wanted, there = site.socket_interface, None
    if wanted is not None and observed.report is not None and observed.report.nodes:
        there = all(interface_of(wanted, n.interfaces) is not None for n in observed.report.nodes)
    return SiteWords(
        name=site.name,
        internet=site.internet_on_compute_nodes,
        socket_interface=wanted,
        interface_there=there,
    )


@contextmanager
def _recorded_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, SIGTERM and a closed terminal take the job and the folder away, however often.

    They are only recorded: one that came down in the middle of sbatch, or of tidying up, would
    leave a job behind.
    """
    came: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        came.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What nohup, or a shell that has put us into the background, ignores stays ignored.
    caught = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, record) for number in caught}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
