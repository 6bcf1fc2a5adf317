"""``status`` and ``explain``: verbs that only read."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slurm_forge.run_directory import RunDirectory

__all__ = ["explain", "status"]

_LOOK_EVERY_S = 1.0

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, or the path of its folder.")
]
Runs = Annotated[
    Path | None,
    typer.Option("--runs", metavar="DIR", help="Folder of runs (SLURM_FORGE_RUNS, else ./runs)."),
]
Json = Annotated[bool, typer.Option("--json", help="For programs: the keys stay as they are.")]


def status(
    run: RunName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay, and tell what happens.")
    ] = False,
    json: Json = False,
    runs: Runs = None,
) -> None:
    """Where a run stands: one screen, and what to do next.

    Example:  slurm-forge status tiny-gpt --follow
    """
    from slurm_forge.cli.places import find_run

    found = find_run(run, runs)
    if follow and json:
        raise typer.BadParameter("--follow is for people; ask for --json again and again instead")
    if follow:
        _follow(found)
        return
    from slurm_forge.cli.gathering import gather
    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.status import take_status
    from slurm_forge.report.status_text import status_text

    taken = take_status(gather(found))
    typer.echo(to_json(taken) if json else status_text(taken), nl=json)


def explain(
    run: RunName,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Tell this attempt in full.", metavar="N")
    ] = None,
    json: Json = False,
    runs: Runs = None,
) -> None:
    """What happened, why, what was changed, what it cost.

    Example:  slurm-forge explain tiny-gpt --attempt 2
    """
    from slurm_forge.cli.gathering import gather
    from slurm_forge.cli.places import find_run
    from slurm_forge.errors import RunDirectoryError
    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.explain import explain as told_by
    from slurm_forge.report.explain import only_attempt
    from slurm_forge.report.explain_text import explain_text

    facts = gather(find_run(run, runs))
    story = told_by(facts)
    chosen = story if attempt is None else only_attempt(story, attempt)
    if chosen is None:
        known = ", ".join(str(one.number) for one in story.attempts)
        raise RunDirectoryError(
            f"{facts.name} has no attempt {attempt}",
            next_step=f"Its attempts: {known}." if known else "It has not been started yet.",
        )
    if json:
        typer.echo(to_json(chosen))
        return
    text = explain_text(story, now=facts.now, reference=facts.reference, attempt=attempt)
    typer.echo(text, nl=False)


def _follow(run: RunDirectory) -> None:
    """Status once, then a line for everything that happens, until the run is at rest."""
    from slurm_forge.cli.gathering import Gathering
    from slurm_forge.cli.watching import Watcher, screen_for
    from slurm_forge.report.explain import AT_REST
    from slurm_forge.report.status import take_status
    from slurm_forge.report.status_text import status_text

    at_rest = {status.value for status in AT_REST}
    gathering = Gathering(run)
    gathering.look()
    taken = take_status(gathering.facts())
    typer.echo(status_text(taken), nl=False)
    if taken.status in at_rest:
        return
    try:
        with screen_for(sys.stdout, total=gathering.total_steps) as screen:
            watcher = Watcher(gathering, screen)
            while taken.status not in at_rest:
                time.sleep(_LOOK_EVERY_S)
                watcher.look()
                taken = take_status(gathering.facts())
    except KeyboardInterrupt:
        return  # the person has seen enough; the run does not notice
    typer.echo(status_text(taken), nl=False)
