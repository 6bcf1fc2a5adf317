"""Arguments and options that several verbs take.  Called by the modules of the verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slurm_forge.cli.completion import run_names, site_names

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Name of a run, or the path of its folder.",
        autocompletion=run_names,
    ),
]
#: Of verbs that ask something of every run of a sweep.
RunsOrJob = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Name of a run or a sweep, the path of its folder, or the id of one of a run's jobs.",
        autocompletion=run_names,
    ),
]
RunOrJob = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Name of a run, the path of its folder, or the id of one of its jobs.",
        autocompletion=run_names,
    ),
]
SubmittedSite = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="NAME|FILE",
        help="Site (default: the one it was submitted with).",
        autocompletion=site_names,
    ),
]
Runs = Annotated[
    Path | None,
    typer.Option(
        "--runs", metavar="DIR", help="Folder of runs (default: SLURM_FORGE_RUNS, ./runs)."
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        min=1,
        metavar="N",
        help="Batch size that run.batches gets from now on, where --set does not show it.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]


def wants_new_code(code: str | None) -> bool:
    """Whether ``--code new`` is given; ``BadParameter`` for another choice."""
    if code not in (None, "new"):
        raise typer.BadParameter('the only choice is "new"', param_hint="--code")
    return code is not None
