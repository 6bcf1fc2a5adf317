"""``run``: a job on this machine, without Slurm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.start.injected_faults import Inject
from slurm_forge.cli.start.settings import Settings

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
            "--runs",
            metavar="DIR",
            help="Folder of runs (SLURM_FORGE_RUNS, runs: of your settings, else ./runs).",
        ),
    ] = None,
    inject: Inject = None,
    settings: Settings = None,
    json: Annotated[
        bool, typer.Option("--json", help="Say nothing until the end, then explain as JSON.")
    ] = False,
) -> None:
    """Train on this machine until the run is finished.

    A run that was begun with the same job goes on.  Ctrl-C (or SIGTERM) lets it save at
    its next step and stop; once more ends it at once.  Exit status 0: it is finished.
    1: it was held, stopped or failed, and explain says why.  130, 143: ended by a signal.

    \b
    Examples:
      slurm-forge run train.yaml
      slurm-forge run train.yaml --ranks 2 --runs tried
      slurm-forge run train.yaml --inject nan@120,kill@350:rank0
      slurm-forge run train.yaml --set args.max_steps=50 --set name=tried
    """
    from slurm_forge.cli.failure import INTERRUPTED
    from slurm_forge.cli.run_choice import reference
    from slurm_forge.launch.local.runner import ENDED_BY_SIGNAL

    found, file = _prepared(job, runs, inject or [], settings or [], ranks)
    if found.is_done():
        if json:
            _tell(found, as_json=True)
        else:
            how = f"slurm-forge explain {reference(found)}"
            typer.echo(f"{found.name} is finished already.   how it went: {how}")
        return
    count = ranks or file.job.resources.tasks_per_node
    try:
        code = _unwatched(found, file, count) if json else _watched(found, file, count)
    except KeyboardInterrupt:  # before it listened for it
        typer.echo(f"\ninterrupted.   see: slurm-forge status {reference(found)}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    stopped = code > ENDED_BY_SIGNAL and _stopped(
        found, again=_typed(job, ranks, runs, inject or [], settings or [])
    )
    if json or not stopped:
        if not json:
            typer.echo("")
        _tell(found, as_json=json)
    raise typer.Exit(code)


def _stopped(found: RunDirectory, *, again: str) -> bool:
    """After a signal: where the run stands and how it goes on; False where there is more to it."""
    from slurm_forge.journal import RunStatus
    from slurm_forge.launch.submit.submission import run_state

    state = run_state(found)
    step = state.committed_step
    where = "no checkpoint yet" if step is None else f"the last checkpoint is of step {step}"
    typer.echo(f"{found.name}: stopped, {where}.   go on: {again}", err=True)
    return state.status not in (RunStatus.HELD, RunStatus.FINISHED)


def _typed(
    job: Path, ranks: int | None, runs: Path | None, inject: list[str], settings: list[str]
) -> str:
    """The command that was given."""
    import shlex

    words = ["slurm-forge", "run", str(job)]
    words += [] if ranks is None else ["--ranks", str(ranks)]
    words += [] if runs is None else ["--runs", str(runs)]
    for faults in inject:
        words += ["--inject", faults]
    for setting in settings:
        words += ["--set", setting]
    return shlex.join(words)


def _prepared(
    path: Path, runs: Path | None, inject: list[str], settings: list[str], ranks: int | None
) -> tuple[RunDirectory, RunFile]:
    """The run of the job file: a new one, or the one that was begun with it."""
    import shlex

    from slurm_forge.cli.preparation import (
        check,
        make,
    )
    from slurm_forge.cli.run_choice import (
        runs_folder,
        site_places,
    )
    from slurm_forge.cli.start.injected_faults import rehearsed
    from slurm_forge.errors import ConfigError
    from slurm_forge.launch.submit.submission import (
        renew_run,
        untouched,
    )
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.site.detection import GENERIC
    from slurm_forge.spec.run_file import read_run_file

    checked = check(path, settings)
    if checked.job.entry is None:
        raise ConfigError(
            "command: slurm-forge run trains an entry",
            path=path,
            next_step=f"To start a command here: slurm-forge exec --job {shlex.quote(str(path))}",
        )
    count = ranks or checked.job.resources.tasks_per_node
    checked = rehearsed(checked, inject, ranks=count)
    for doubt in checked.doubts:
        typer.echo(doubt, err=True)
    folder = runs_folder(runs, checked.runs)
    found = RunDirectory.at(folder / checked.job.name)
    if not found.spec_file.is_file() or untouched(found):
        return make(checked, runs=folder, site=site_places().load(GENERIC).site)
    file = read_run_file(found.spec_file)
    return found, renew_run(found, file, checked.job, path)


def _watched(found: RunDirectory, file: RunFile, ranks: int) -> int:
    from slurm_forge.cli.observe.follow import (
        Watcher,
        screen_for,
    )
    from slurm_forge.cli.observe.run_reading import Gathering
    from slurm_forge.launch.local.runner import run_locally

    gathering = Gathering(found)
    gathering.look()  # what happened before today is for explain
    with screen_for(sys.stdout) as screen:
        watcher = Watcher(gathering, screen)
        code = run_locally(
            found, file, ranks, lambda state: watcher.look(), say=screen.line, again=True
        )
        watcher.look()
    return code


def _unwatched(found: RunDirectory, file: RunFile, ranks: int) -> int:
    from slurm_forge.launch.local.runner import run_locally

    def say(text: str) -> None:
        typer.echo(text, err=True)

    return run_locally(found, file, ranks, lambda state: None, say=say, again=True)


def _tell(found: RunDirectory, *, as_json: bool) -> None:
    from slurm_forge.cli.observe.run_reading import gather
    from slurm_forge.report.explain.explain import explain
    from slurm_forge.report.explain.explain_text import explain_text

    facts = gather(found)
    if as_json:
        from slurm_forge.report.encoding import to_json

        typer.echo(to_json(explain(facts)))
        return
    text = explain_text(explain(facts), now=facts.now, reference=facts.reference)
    typer.echo(text, nl=False)
