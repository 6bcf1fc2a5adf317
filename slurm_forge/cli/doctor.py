"""``doctor``: what this cluster will do to a run, and whether the site file says so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slurm_forge.cli.completing import site_names

__all__ = ["doctor"]

_PROBLEMS = 1


def doctor(
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="[JOB.yaml]",
            help="A job file: what happens to that job; else to jobs of every partition.",
            show_default=False,
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            "--site",
            metavar="NAME|FILE",
            help="The site file to compare with (SLURM_FORGE_SITE, else what Slurm is called).",
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
            "--runs", metavar="DIR", help="Folder of runs (SLURM_FORGE_RUNS, else ./runs)."
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Submit a job of about a minute, and see it happen.")
    ] = False,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=2, help="For --live: 1 or 2 nodes.")
    ] = 1,
    requeue_too: Annotated[
        bool,
        typer.Option("--requeue-too", help="For --live: the job requeues itself once, timed."),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="For --live: not Slurm's own warning, which takes a minute."),
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="For --live: its folder stays.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="For programs: the keys stay as they are.")
    ] = False,
) -> None:
    """What this cluster will do to a run, what the site file says otherwise, and the storage.

    Exit status: 0 all is well, 1 there are problems, 2 it could not be looked at.

    \b
    Examples:
      slurm-forge doctor
      slurm-forge doctor train.yaml
      slurm-forge doctor --partition preempt --json
      slurm-forge doctor --live --partition preempt
    """
    if live:
        from slurm_forge.cli.doctor_live import LiveRequest, examine_live

        request = LiveRequest(
            job=job,
            site=site,
            partition=partition,
            qos=qos,
            account=account,
            runs=runs,
            nodes=nodes,
            requeue_too=requeue_too,
            quick=quick,
            keep=keep,
            json=json,
        )
        raise typer.Exit(examine_live(request))
