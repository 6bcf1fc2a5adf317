"""``watch``: looks after many runs, on a login node or by cron."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.completion import run_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_forge.launch.watch.watcher import (
        HandledFinding,
        Round,
        Watcher,
    )
    from slurm_forge.recovery.run_watch import WatchFinding, WatchLimits
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.run_directory.reported_findings import ReportedFindings
    from slurm_forge.slurm.client import Slurm

#: Exit status where something new needs a person.
_NEWS = 1
_LONGEST_PAUSE_S = 900.0
#: A controller that takes long to answer is asked less often: its time is everybody's.
_SHARE = 20.0
_HOOK_S = 30.0
_MINUTE_S = 60.0


def watch(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Names or folders of runs and sweeps (default: all in the folder of runs).",
            autocompletion=run_names,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Check once and exit, for cron.")] = False,
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="Time between checks: 60s, 5m.")
    ] = "60s",
    hook: Annotated[
        str | None,
        typer.Option("--hook", metavar="CMD", help="Program that gets new findings as JSON."),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Requeue runs whose job has disappeared."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON with stable keys, one document per check.")
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="DIR", help="Folder of runs (SLURM_FORGE_RUNS, ./runs)."),
    ] = None,
) -> None:
    """Watch runs: report once what is held, gone, stuck or waiting for something that can't happen.

    Requeues that Slurm did not confirm are retried.  Slurm is queried once for all runs.
    With --once, exit status 1: something new needs attention; 2: it could not check.

    \b
    Examples:
      slurm-forge watch
      slurm-forge watch --once --hook ~/bin/notify-me
      slurm-forge watch tiny-gpt --every 5m --restart
    """
    from datetime import timedelta

    from slurm_forge.cli.failure import FAILED
    from slurm_forge.cli.run_choice import (
        reference,
        run_names,
        runs_folder,
        runs_meant,
        site_places,
        state_folder,
    )
    from slurm_forge.errors import ForgeError, RunDirectoryError
    from slurm_forge.knobs import Knobs, process_environ
    from slurm_forge.launch.watch.notify import hook_words
    from slurm_forge.launch.watch.run_notifications import RunNotifications
    from slurm_forge.launch.watch.watcher import Watcher
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.run_directory.reported_findings import ReportedFindings
    from slurm_forge.slurm.client import SubprocessSlurm
    from slurm_forge.units import parse_duration

    try:
        pause_s = max(1.0, parse_duration(every).total_seconds())
    except ValueError as error:
        raise typer.BadParameter(f"--every: {error}") from None
    words = None if hook is None else hook_words(hook)
    folder = runs_folder(runs).absolute()
    if not run and not folder.is_dir():
        raise RunDirectoryError(
            f"there is no folder {folder}: nothing would be watched",
            next_step="Give the folder of runs: --runs DIR or SLURM_FORGE_RUNS.",
        )
    slurm = SubprocessSlurm.of_this_process()
    reported = ReportedFindings(state_folder() / "watch", folder)
    reported.make()
    places = site_places()
    # What goes before the name of each run there; worked out once, and not for each of thousands.
    before = reference(RunDirectory.at(folder / "x"))[:-1]

    def name_of(target: RunDirectory) -> str:
        return before + target.name if target.path.parent == folder else reference(target)

    watcher = Watcher(
        slurm,
        limits=_limits(slurm, restart=restart),
        name_of=name_of,
        site_of=lambda name: places.load(name).site,
    )
    notifications = RunNotifications(Knobs.from_environ(process_environ()))
    selection = None if not run else [each for name in run for each in runs_meant(name, runs)]

    def chosen() -> list[RunDirectory]:
        return selection or [RunDirectory.at(folder / name) for name in run_names(folder)]

    pause, answered = pause_s, True
    while True:
        try:
            looked_at = chosen()
            round_, news = _check(watcher, looked_at, reported, whole=not selection)
            notifications.look(looked_at, _by_run(round_.findings))
            _report(round_, news, folder, words, as_json=json)
            if round_.answered is not answered and not json:
                _say_whether_it_answers(round_)
            answered = round_.answered
        except BrokenPipeError:
            raise
        except (ForgeError, OSError) as error:
            if once:
                raise
            # Another watcher that takes long, a disk that is full for a while: it looks again.
            typer.echo(f"check failed: {' '.join(str(error).split())}", err=True)
            pause = min(2 * pause, max(_LONGEST_PAUSE_S, pause_s))
            if not _rested(pause):
                return
            continue
        if once:
            notifications.finish(timedelta(seconds=_HOOK_S))
            needed = any(one.finding.person for one in news)
            raise typer.Exit(_NEWS if needed else 0 if answered else FAILED)
        pause = pause_s if round_.answered else min(2 * pause, max(_LONGEST_PAUSE_S, pause_s))
        if not _rested(max(pause, _SHARE * round_.asked_s)):
            return


def _by_run(handled: Sequence[HandledFinding]) -> dict[str, list[WatchFinding]]:
    findings: dict[str, list[WatchFinding]] = {}
    for one in handled:
        findings.setdefault(one.path, []).append(one.finding)
    return findings


def _rested(seconds: float) -> bool:
    """Sleep between checks; False if the user interrupts."""
    try:
        _rest(seconds)
    except KeyboardInterrupt:
        return False
    return True


def _say_whether_it_answers(round_: Round) -> None:
    """When it begins and when it ends, and not with every look between."""
    words = "answers again" if round_.answered else f"could not be queried: {round_.why}"
    typer.echo(f"Slurm's queue {words}", err=True)
    if round_.next_step:
        typer.echo(f"  {round_.next_step}", err=True)


def _rest(seconds: float) -> None:
    time.sleep(seconds)


def _limits(slurm: Slurm, *, restart: bool) -> WatchLimits:
    """What the watcher may do, with the cluster's own delay after a requeue."""
    from slurm_forge.errors import ForgeError
    from slurm_forge.recovery.run_watch import WatchLimits

    try:
        delay = slurm.show_config().requeue_delay.total_seconds()
    except ForgeError:
        return WatchLimits(restart=restart, shorten=False)
    return WatchLimits(restart=restart, delay_s=delay, shorten=delay > _SHARE)


def _check(
    watcher: Watcher, runs: Sequence[RunDirectory], reported: ReportedFindings, *, whole: bool
) -> tuple[Round, list[HandledFinding]]:
    """One round, alone on this host, and those of its findings that are new."""
    from datetime import timedelta

    from slurm_forge.lock import exclusive

    with exclusive(reported.lock, timedelta(seconds=_MINUTE_S)):
        round_ = watcher.round(runs)
        before = reported.read()
        news = [one for one in round_.findings if one.finding.key not in before.get(one.path, ())]
        now: dict[str, tuple[str, ...]] = {}
        for one in round_.findings:
            now[one.path] = (*now.get(one.path, ()), one.finding.key)
        if not whole or not round_.answered or round_.left:
            # What was not looked at now is not over.
            looked = {str(run.path) for run in runs} if round_.answered and not round_.left else ()
            others = {path: keys for path, keys in before.items() if path not in looked}
            now = {**others, **now}
        if now != before:
            reported.write(now)
    return round_, news


def _report(
    round_: Round,
    news: Sequence[HandledFinding],
    folder: Path,
    hook: tuple[str, ...] | None,
    *,
    as_json: bool,
) -> None:
    from slurm_forge.recovery.run_watch import FindingKind
    from slurm_forge.report.encoding import to_json
    from slurm_forge.report.status.watch_lines import (
        alert,
        finding_lines,
        watch_report,
    )

    # A shortened wait is of no interest to anybody, unless it failed.
    quiet = FindingKind.DELAYED
    findings = [one for one in news if one.finding.kind is not quiet or one.finding.person]
    if as_json:
        typer.echo(to_json(watch_report(round_, news, str(folder))))
    else:
        for one in findings:
            for line in finding_lines(one):
                typer.echo(line)
    if hook is None or not findings:
        return
    import socket
    from datetime import timedelta

    from slurm_forge.knobs import process_environ
    from slurm_forge.launch.watch.notify import run_hook
    from slurm_forge.person import person

    body = to_json(
        alert(
            findings,
            time=round_.time,
            host=socket.gethostname(),
            user=person(),
            folder=str(folder),
        )
    )
    failed = run_hook(hook, body, timedelta(seconds=_HOOK_S), process_environ())
    if failed is not None:
        typer.echo(f"the hook: {failed}", err=True)
