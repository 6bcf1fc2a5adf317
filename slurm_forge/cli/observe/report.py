"""``report``: a run, a sweep or several runs as one HTML file."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.completion import run_names
from slurm_forge.cli.options import Runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.spec.sweep_runs import SweepFile

_STDOUT = Path("-")
_SEVERAL = "slurm-forge-report.html"


def report(
    run: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN…",
            help="Runs or a sweep: names, or paths of folders.",
            autocompletion=run_names,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="File to write, - for stdout (default: report.html in the folder of the run).",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    runs: Runs = None,
) -> None:
    """Write what happened, what it cost and what to do next as one HTML file.

    The file is complete and needs no network.  A run also keeps report.html in its folder up to
    date while it trains.

    \b
    Examples:
      slurm-forge report tiny-gpt
      slurm-forge report tiny-gpt --open
      slurm-forge report run-a run-b run-c -o comparison.html
      ssh login slurm-forge report tiny-gpt -o - > tiny-gpt.html
    """
    from slurm_forge.cli.run_choice import find_run, find_sweep

    if show and out == _STDOUT:
        raise typer.BadParameter("--open needs a file", param_hint="--open")
    sweep = find_sweep(run[0], runs) if len(run) == 1 else None
    if sweep is not None:
        folder = sweep[1][0].path.parent / sweep[0].name
        path = out or folder / "report.html"
        page = _sweep(*sweep, folder, path)
    elif len(run) == 1:
        directory = find_run(run[0], runs)
        own = directory.is_own()
        path = out or (directory.report_file if own else Path(f"{directory.name}-report.html"))
        page = _run(directory)
    else:
        path = out or Path(_SEVERAL)
        page = _several([find_run(each, runs) for each in run], path)
    _write(page, path, show=show)


def _write(page: str, path: Path, *, show: bool) -> None:
    if path == _STDOUT:
        typer.echo(page, nl=False)
        return
    from slurm_forge.errors import ConfigError
    from slurm_forge.files import write_atomic

    try:
        write_atomic(path, page.encode(), mode=0o644, durable=False)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror or error}",
            next_step="Choose another file: -o FILE, or -o - for standard output.",
        ) from error
    typer.echo(path)
    if show:
        import webbrowser

        if not webbrowser.open(path.absolute().as_uri()):
            typer.echo("No browser could be opened here: copy the file to where one is.", err=True)


def _run(run: RunDirectory) -> str:
    from slurm_forge.cli.observe.report_sources import read_sources
    from slurm_forge.report.page.html import run_html
    from slurm_forge.report.page.run_page import run_page

    return run_html(run_page(read_sources(run), utc_offset=_utc_offset()))


def _sweep(sweep: SweepFile, runs: tuple[RunDirectory, ...], folder: Path, path: Path) -> str:
    from slurm_forge.cli.run_choice import reference
    from slurm_forge.run_directory import RunDirectory

    settings = [entry.settings for entry in sweep.runs]
    name = reference(RunDirectory.at(folder))
    return _index(sweep.name, "sweep", list(zip(runs, settings, strict=True)), path, name)


def _several(runs: list[RunDirectory], path: Path) -> str:
    title = ", ".join(run.name for run in runs[:3]) + (", …" if len(runs) > 3 else "")
    return _index(title, f"{len(runs)} runs", [(run, {}) for run in runs], path, "")


def _index(
    title: str,
    kind: str,
    runs: list[tuple[RunDirectory, dict[str, object]]],
    path: Path,
    name: str,
) -> str:
    import time

    from slurm_forge.cli.observe.report_sources import read_sources
    from slurm_forge.errors import ForgeError
    from slurm_forge.report.page.html import index_html
    from slurm_forge.report.page.index_page import index_page, indexed, unreadable
    from slurm_forge.run_directory import RunDirectory

    offset, link = _utc_offset(), _links_from(path)
    rows = []
    for run, settings in runs:
        try:
            # Slurm is not asked about each of a thousand runs: the journals suffice.
            sources = read_sources(RunDirectory.existing(run.path), brief=True, ask=lambda _: None)
            rows.append(indexed(sources, utc_offset=offset, settings=settings, link=link(run)))
        except (ForgeError, OSError) as error:
            rows.append(unreadable(run.name, str(error), settings))
    page = index_page(title, kind, rows, now=time.time(), utc_offset=offset, reference=name)
    return index_html(page)


def _links_from(path: Path) -> Callable[[RunDirectory], str]:
    """How a file at ``path`` links to the report of a run; empty where there is none."""
    import os
    from urllib.parse import quote

    def link(run: RunDirectory) -> str:
        if path == _STDOUT or not run.report_file.is_file():
            return ""
        return "./" + quote(os.path.relpath(run.report_file, path.absolute().parent))

    return link


def _utc_offset() -> timedelta:
    """Of the clock here, at this time of the year."""
    from datetime import datetime

    return datetime.now().astimezone().utcoffset() or timedelta(0)
