"""``run``: a job on this machine, without Slurm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.spec.run_file import RunFile

__all__ = ["run"]


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    ranks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes; without it, resources.tasks_per_node."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs", metavar="DIR", help="Folder of runs (SLURM_FORGE_RUNS, else ./runs)."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Say nothing until the end, then explain as JSON.")
    ] = False,
) -> None:
    """Train on this machine until the run is finished.

    A run that was begun with the same job goes on.  Exit status 0: it is finished.
    1: it was held, stopped or failed, and explain says why.

    Example:  slurm-forge run train.yaml --ranks 2
    """
    from slurm_forge.cli.failing import INTERRUPTED
    from slurm_forge.cli.places import reference

    found, file = _prepared(job, runs)
    if found.is_done():
        if not json:
            typer.echo(f"{found.name} is finished already.")
        _tell(found, as_json=json)
        return
    try:
        count = ranks or file.job.resources.tasks_per_node
        code = _unwatched(found, file, count) if json else _watched(found, file, count)
    except KeyboardInterrupt:
        where = reference(found)
        typer.echo(f"\ninterrupted.   see: slurm-forge status {where}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if not json:
        typer.echo("")
    _tell(found, as_json=json)
    raise typer.Exit(code)


def _prepared(path: Path, runs: Path | None) -> tuple[RunDirectory, RunFile]:
    """The run of the job file: a new one, or the one that was begun with the same job."""
    from slurm_forge.cli.places import runs_folder, site_places
    from slurm_forge.cli.preparing import check, make
    from slurm_forge.errors import ConfigError
    from slurm_forge.launch.submission import untouched
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.site.detection import GENERIC
    from slurm_forge.spec.run_file import read_run_file

    checked = check(path)
    for doubt in checked.doubts:
        typer.echo(doubt, err=True)
    folder = runs_folder(runs)
    found = RunDirectory.at(folder / checked.job.name)
    if not found.spec_file.is_file() or untouched(found):
        return make(checked, runs=folder, site=site_places().load(GENERIC).site)
    file = read_run_file(found.spec_file)
    if file.job != checked.job:
        raise ConfigError(
            f"the run {found.path} was begun with another job than this file now says",
            path=path,
            next_step="Choose another name in the job file; a run keeps what it was begun with.",
        )
    if not found.is_done():
        _ask_again(found)
    return found, file


def _ask_again(found: RunDirectory) -> None:
    """A person wants it to go on: an old request to stop does not count any more."""
    import getpass

    from slurm_forge.journal.events import UserAsked
    from slurm_forge.launch.submission import note

    found.stop_file.unlink(missing_ok=True)
    note(found, UserAsked(verb="run", user=getpass.getuser()))


def _watched(found: RunDirectory, file: RunFile, ranks: int) -> int:
    from slurm_forge.cli.gathering import Gathering
    from slurm_forge.cli.watching import Watcher, screen_for
    from slurm_forge.launch.local import run_locally

    gathering = Gathering(found)
    gathering.look()  # what happened before today is for explain
    with screen_for(sys.stdout, total=gathering.total_steps) as screen:
        watcher = Watcher(gathering, screen)
        code = run_locally(found, file, ranks, lambda state: watcher.look())
        watcher.look()
    return code


def _unwatched(found: RunDirectory, file: RunFile, ranks: int) -> int:
    from slurm_forge.launch.local import run_locally

    return run_locally(found, file, ranks, lambda state: None)


def _tell(found: RunDirectory, *, as_json: bool) -> None:
    from slurm_forge.cli.gathering import gather
    from slurm_forge.report.explain import explain
    from slurm_forge.report.explain_text import explain_text

    facts = gather(found)
    if as_json:
        from slurm_forge.report.encoding import to_json

        typer.echo(to_json(explain(facts)))
        return
    text = explain_text(explain(facts), now=facts.now, reference=facts.reference)
    typer.echo(text, nl=False)
