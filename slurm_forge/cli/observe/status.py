"""``status`` and ``explain``: verbs that only read."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.completion import run_names
from slurm_forge.cli.options import AsJson, RunName, Runs

if TYPE_CHECKING:
    from slurm_forge.report.status.report_facts import RunFacts
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.spec.sweep_runs import SweepFile

_LOOK_EVERY_S = 1.0
_FIGURES_EVERY_S = 30.0


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Name of a run or a sweep, or the path of its folder (default: all runs).",
            autocompletion=run_names,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep running and print what happens.")
    ] = False,
    json: AsJson = False,
    runs: Runs = None,
) -> None:
    """Show the state of a run or a sweep on one screen, and what to do next.

    Without RUN, a line for every run and every sweep in the folder of runs.

    \b
    Examples:
      slurm-forge status
      slurm-forge status tiny-gpt --follow
      slurm-forge status tiny-gpt --json
    """
    from slurm_forge.cli.run_choice import find_run, find_sweep

    if run is None:
        if follow:
            raise typer.BadParameter("--follow needs the name of a run")
        _list(runs, as_json=json)
        return
    sweep = find_sweep(run, runs)
    if sweep is not None:
        if follow:
            raise typer.BadParameter("--follow needs one run of the sweep, such as " + f"{run}-0")
        _sweep(*sweep, as_json=json)
        return
    directory = find_run(run, runs)
    if follow and json:
        raise typer.BadParameter("--follow and --json do not go together")
    if follow:
        _follow(directory)
        return
    from slurm_forge.cli.observe.run_reading import gather
    from slurm_forge.cli.observe.surroundings import (
        surrounded,
        with_queue,
    )
    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.status.status import take_status
    from slurm_forge.report.status.status_text import status_text

    facts = with_queue(lambda: surrounded(gather(directory, logs=False), directory))
    report = take_status(facts)
    typer.echo(to_json(report) if json else status_text(report), nl=json)


def explain(
    run: RunName,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Show this attempt in full.", metavar="N")
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Show archived attempts one by one, too."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show exceptions and other evidence unabridged.")
    ] = False,
    json: AsJson = False,
    runs: Runs = None,
) -> None:
    """What happened, why, what changed, what it cost.

    The oldest attempts of a run with more than 80 are archived: they are summarized, and costs
    and changes are those since then.  --all and --json show everything.

    \b
    Examples:
      slurm-forge explain tiny-gpt
      slurm-forge explain tiny-gpt --attempt 2
      slurm-forge explain tiny-gpt --all
      slurm-forge explain tiny-gpt --json
    """
    from slurm_forge.cli.observe.run_reading import gather
    from slurm_forge.cli.observe.surroundings import (
        surrounded,
        with_queue,
    )
    from slurm_forge.cli.run_choice import find_run
    from slurm_forge.errors import RunDirectoryError
    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.explain.explain import explain as told_by
    from slurm_forge.report.explain.explain import only_attempt
    from slurm_forge.report.explain.explain_text import explain_text

    directory = find_run(run, runs)
    whole = every or json
    facts = with_queue(lambda: surrounded(gather(directory, whole=whole), directory))
    archived = 0 if facts.earlier is None else facts.earlier.attempt
    if attempt is not None and attempt <= archived and not whole:
        whole = True
        facts = with_queue(lambda: surrounded(gather(directory, whole=True), directory))
    story = told_by(facts)
    chosen = story if attempt is None else only_attempt(story, attempt)
    if chosen is None:
        numbers = [str(one.number) for one in story.attempts]
        known = ", ".join(numbers if whole or not archived else [f"1 to {archived}", *numbers])
        raise RunDirectoryError(
            f"{facts.name} has no attempt {attempt}",
            next_step=f"Its attempts: {known}." if known else "It has not been started yet.",
        )
    if json:
        typer.echo(to_json(chosen))
        return
    text = explain_text(
        story,
        now=facts.now,
        reference=facts.reference,
        attempt=attempt,
        verbose=verbose,
        earlier=None if whole else facts.earlier_state,
    )
    typer.echo(text, nl=False)


def _sweep(sweep: SweepFile, runs: tuple[RunDirectory, ...], *, as_json: bool) -> None:
    """A sweep and all of its runs."""
    from slurm_forge.cli.observe.sweep_reading import read_sweep
    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.status.sweep_status import sweep_text

    report = read_sweep(sweep, runs, runs[0].path.parent / sweep.name)
    typer.echo(to_json(report) if as_json else sweep_text(report), nl=as_json)


def _list(runs: Path | None, *, as_json: bool) -> None:
    """A line for every run and for every sweep, whatever is wrong with one of them."""
    from slurm_forge.cli.observe.run_list import Lister
    from slurm_forge.cli.run_choice import (
        from_here,
        run_names,
        runs_folder,
        runs_of_submitit,
        sweep_names,
    )
    from slurm_forge.errors import ForgeError
    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.status.run_listing import (
        listing,
        listing_text,
        unreadable,
    )
    from slurm_forge.run_directory import RunDirectory

    folder = runs_folder(runs)
    lines = []
    lister = Lister(folder.absolute(), words=as_json)
    names = run_names(folder)
    for name in names:
        run = RunDirectory.at(folder / name)
        try:
            lines.append(lister.line(run))
        except (ForgeError, OSError) as error:
            lines.append(unreadable(name, str(run.path), str(error)))
    lister.close()
    others = [] if runs is not None else [from_here(path) for path in runs_of_submitit()]
    sweeps = {}
    for name in sweep_names(folder, besides=names):
        from slurm_forge.spec.sweep_runs import read_sweep_file

        with suppress(ForgeError, OSError):  # status SWEEP says what is wrong with it
            sweeps[name] = [each.run for each in read_sweep_file(folder / name).runs]
    runs_shown = listing(str(folder.absolute()), lines, elsewhere=others, sweeps=sweeps)
    typer.echo(to_json(runs_shown) if as_json else listing_text(runs_shown), nl=as_json)


def _follow(run: RunDirectory) -> None:
    """Status once, then a line for everything that happens, until the run is at rest."""
    from slurm_forge.cli.observe.follow import (
        RunFollower,
        screen_for,
    )
    from slurm_forge.cli.observe.run_reading import RunReader
    from slurm_forge.cli.observe.surroundings import (
        surrounded,
        with_queue,
    )
    from slurm_forge.report.explain.explain import AT_REST
    from slurm_forge.report.status.status import take_status
    from slurm_forge.report.status.status_text import (
        figures,
        status_text,
    )
    from slurm_forge.report.text import clock

    at_rest = {status.value for status in AT_REST}
    gathering = RunReader(run)

    def read() -> RunFacts:
        gathering.poll()
        return surrounded(gathering.facts(), run)

    # Asked once: the journal shows changes, and Slurm has better things to do.
    facts = with_queue(read)
    report = take_status(facts)
    typer.echo(status_text(report), nl=False)
    if report.status in at_rest:
        return
    try:
        with screen_for(sys.stdout) as screen:
            watcher = RunFollower(gathering, screen)
            logged, tell_from = report.logged, time.monotonic() + _FIGURES_EVERY_S
            while report.status not in at_rest:
                time.sleep(_LOOK_EVERY_S)
                watcher.poll()
                facts = surrounded(gathering.facts(), run)
                report = take_status(facts)
                if report.logged != logged and time.monotonic() >= tell_from:
                    logged, tell_from = report.logged, time.monotonic() + _FIGURES_EVERY_S
                    screen.line(f"{clock(time.time())}  {figures(logged)}")
    except KeyboardInterrupt:
        return  # the person has seen enough; the run does not notice
    typer.echo(status_text(report), nl=False)
