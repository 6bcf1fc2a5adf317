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
    from slurm_forge.spec.resources import Resources
    from slurm_forge.spec.run_file import RunFile


def run(
    job: Annotated[
        Path,
        typer.Argument(metavar="JOB.yaml|RUN", help="The job file, or a run to continue as it is."),
    ],
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes; without it, as many as before, at first resources.tasks_per_node.",
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            metavar="DIR",
            help="Folder of runs (default: SLURM_FORGE_RUNS, runs: in your settings, ./runs).",
        ),
    ] = None,
    inject: Inject = None,
    settings: Settings = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print nothing until the end, then explain as JSON.")
    ] = False,
) -> None:
    """Train on this machine until the run is finished.

    A run that was started with the same job continues.  Ctrl-C (or SIGTERM) makes it save
    at its next step and stop; a second one ends it at once.  Exit status 0: it is finished.
    1: it was held, stopped or failed; explain says why.  130, 143: ended by a signal.

    \b
    Examples:
      slurm-forge run train.yaml
      slurm-forge run train.yaml --ranks 2 --runs tried
      slurm-forge run train.yaml --inject nan@120,kill@350:rank0
      slurm-forge run train.yaml --set args.max_steps=50 --set name=tried
      slurm-forge run tried
    """
    from slurm_forge.cli.failure import INTERRUPTED
    from slurm_forge.cli.run_choice import reference
    from slurm_forge.launch.local.runner import ENDED_BY_SIGNAL
    from slurm_forge.recovery.policy.remedies import train_further

    directory, file = _prepared(job, runs, inject or [], settings or [], ranks)
    if directory.is_done():
        if json:
            _print_story(directory, as_json=True)
        else:
            name = reference(directory)
            typer.echo(
                f"{directory.name} is already finished.   how it went: slurm-forge explain {name}\n"
                f"to train further: {train_further(name)}"
            )
        return
    file, count = _with_ranks(directory, file, ranks)
    if not json:
        _announce(directory, file.job.resources, count)
    try:
        code = _unwatched(directory, file, count) if json else _watched(directory, file, count)
    except KeyboardInterrupt:  # before it listened for it
        typer.echo(f"\ninterrupted.   see: slurm-forge status {reference(directory)}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    stopped = code > ENDED_BY_SIGNAL and _stopped(
        directory, again=_typed(job, ranks, runs, inject or [], settings or [])
    )
    if json or not stopped:
        if not json:
            typer.echo("")
        _print_story(directory, as_json=json)
    raise typer.Exit(code)


def _with_ranks(run: RunDirectory, file: RunFile, ranks: int | None) -> tuple[RunFile, int]:
    """The number of processes of the run, which later starts and forks inherit."""
    from slurm_forge.launch.attempt.run_lock import hold_run_lock
    from slurm_forge.spec.run_file import read_run_file, replace_run_file

    usual = file.job.resources.tasks_per_node
    count = ranks or file.ranks or usual
    kept = None if count == usual else count
    if kept != file.ranks:
        with hold_run_lock(run):
            was = read_run_file(run.spec_file)
            file = was.model_copy(update={"ranks": kept})
            replace_run_file(run, was, file)
    return file, count


def _stopped(directory: RunDirectory, *, again: str) -> bool:
    """After a signal: the state of the run and how to continue it; False if it is held or done."""
    from slurm_forge.journal import RunStatus
    from slurm_forge.launch.submit.submission import run_state

    state = run_state(directory)
    step = state.committed_step
    where = "no checkpoint yet" if step is None else f"the last checkpoint is of step {step}"
    typer.echo(f"{directory.name}: stopped, {where}.   to continue: {again}", err=True)
    return state.status not in (RunStatus.HELD, RunStatus.FINISHED)


def _announce(run: RunDirectory, resources: Resources, ranks: int) -> None:
    """Print what is ignored of the job file, and where the output of the ranks is."""
    from slurm_forge.cli.run_choice import from_here

    if resources.nodes > 1:
        count = "1 rank" if ranks == 1 else f"{ranks} ranks"
        ignored = f"resources.nodes: {resources.nodes} is ignored"
        typer.echo(f"{ignored}: {count} on this machine (--ranks N)", err=True)
    typer.echo(f"output of the ranks: {from_here(run.submissions)}/*_log.out (and .err)", err=True)


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
    """The run of the job file: a new one, or the one that it started before."""
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
    from slurm_forge.site.loading import GENERIC
    from slurm_forge.spec.run_file import read_run_file

    begun = _begun(path, runs)
    if begun is not None:
        _refuse_options(path, inject, settings)
        file = read_run_file(begun.spec_file)
        if file.job.entry is None:
            raise ConfigError(
                f"{begun.name} has a command: slurm-forge run trains an entry",
                next_step="Continue it with slurm-forge exec, as it was started.",
            )
        return begun, file
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
    directory = RunDirectory.at(folder / checked.job.name)
    if not directory.exists() or untouched(directory):
        return make(checked, runs=folder, site=site_places().load(GENERIC).site, queued=False)
    file = read_run_file(directory.spec_file)
    return directory, renew_run(directory, file, checked.job, path)


def _begun(path: Path, runs: Path | None) -> RunDirectory | None:
    """The run of that name or folder; None if it is a job file."""
    from slurm_forge.cli.run_choice import find_run
    from slurm_forge.errors import RunDirectoryError

    if path.is_file():
        return None
    try:
        return find_run(str(path), runs)
    except RunDirectoryError:
        return None


def _refuse_options(run: Path, inject: list[str], settings: list[str]) -> None:
    from slurm_forge.errors import ConfigError

    for option, given in (("--inject", inject), ("--set", settings)):
        if given:
            raise ConfigError(
                f"{option}: a run that exists keeps its job",
                next_step=f"To change it: slurm-forge change {run} --set KEY=VALUE, or give the "
                "job file instead of the run.",
            )


def _watched(directory: RunDirectory, file: RunFile, ranks: int) -> int:
    from slurm_forge.cli.observe.follow import (
        RunFollower,
        screen_for,
    )
    from slurm_forge.cli.observe.run_reading import RunReader
    from slurm_forge.launch.local.runner import run_locally

    gathering = RunReader(directory)
    gathering.poll()  # what happened before today is for explain
    with screen_for(sys.stdout) as screen:
        watcher = RunFollower(gathering, screen)
        code = run_locally(directory, file, ranks, watcher.poll, say=screen.line, again=True)
        watcher.poll()
    return code


def _unwatched(directory: RunDirectory, file: RunFile, ranks: int) -> int:
    from slurm_forge.launch.local.runner import run_locally

    def say(text: str) -> None:
        typer.echo(text, err=True)

    return run_locally(directory, file, ranks, lambda: None, say=say, again=True)


def _print_story(directory: RunDirectory, *, as_json: bool) -> None:
    from slurm_forge.cli.observe.run_reading import gather
    from slurm_forge.cli.observe.surroundings import surrounded
    from slurm_forge.cli.run_choice import from_here
    from slurm_forge.report.explain.explain import explain
    from slurm_forge.report.explain.explain_text import explain_text
    from slurm_forge.report.text import clean

    facts = surrounded(gather(directory, whole=as_json), directory)  # as explain sees it
    if as_json:
        from slurm_forge.report.encoding import to_json

        typer.echo(to_json(explain(facts)))
        return
    text = explain_text(
        explain(facts), now=facts.now, reference=facts.reference, earlier=facts.earlier_state
    )
    typer.echo(text, nl=False)
    if directory.report_file.is_file():
        typer.echo(f"Report: {clean(from_here(directory.report_file), 300)}")
