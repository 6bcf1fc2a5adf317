"""``top``: a live view of many runs, or of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.completion import run_names
from slurm_forge.cli.options import Runs

if TYPE_CHECKING:
    from slurm_forge.cli.monitoring.top_app import Verb, VerbResult
    from slurm_forge.cli.monitoring.top_reading import Fleet
    from slurm_forge.report.top.rows import TopRow
    from slurm_forge.run_directory import RunDirectory

#: Of the newest lines, what is shown as the output of a run.
_LOG_LINES = "500"


def top(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Names or folders of runs and sweeps (default: all in the folder of runs).",
            autocompletion=run_names,
        ),
    ] = None,
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="Minimum time between refreshes.")
    ] = "2s",
    runs: Runs = None,
) -> None:
    """A live view of runs: state, step, loss, goodput, nodes, events; keys act on the chosen one.

    Needs a terminal and the extra slurm_forge[top].  Slurm is asked once in 15 s for all runs.

    \b
    Examples:
      slurm-forge top
      slurm-forge top tiny-gpt
      slurm-forge top --every 10s
    """
    from slurm_forge.errors import ConfigError
    from slurm_forge.units import parse_duration

    try:
        every_s = max(0.2, parse_duration(every).total_seconds())
    except ValueError as error:
        raise typer.BadParameter(f"--every: {error}") from None
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise ConfigError(
            "slurm-forge top needs a terminal",
            next_step="For pipes and files: slurm-forge status, or slurm-forge status RUN --follow",
        )
    try:
        import textual  # noqa: F401
    except ImportError:
        raise ConfigError(
            "slurm-forge top needs Textual, which is not installed",
            next_step="Install the extra: pip install 'slurm_forge[top]'.  Without it: "
            "slurm-forge status RUN --follow",
        ) from None
    from slurm_forge.cli.monitoring.top_app import TopApp

    chosen = _chosen(run or [], runs)
    where, fleet = _fleet(chosen, runs)
    encoding = (getattr(sys.__stderr__, "encoding", "") or "").lower().replace("-", "")
    TopApp(
        fleet,
        where,
        carry_out,
        one=chosen is not None and len(chosen) == 1,
        ascii_only=encoding != "utf8",
        every_s=every_s,
    ).run(mouse=False)  # which would be sent for every move
    fleet.close()


def _chosen(names: list[str], runs: Path | None) -> list[RunDirectory] | None:
    """The runs that are named; None where none is."""
    from slurm_forge.cli.run_choice import runs_meant

    return [each for name in names for each in runs_meant(name, runs)] or None


def _fleet(chosen: list[RunDirectory] | None, runs: Path | None) -> tuple[str, Fleet]:
    import shutil

    from slurm_forge.cli.monitoring.top_reading import Fleet
    from slurm_forge.cli.run_choice import from_here, runs_folder
    from slurm_forge.cli.run_choice import run_names as names_in
    from slurm_forge.errors import RunDirectoryError
    from slurm_forge.report.text import plural
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.slurm.client import SubprocessSlurm

    folder = runs_folder(runs).absolute()
    if chosen is None and not folder.is_dir():
        raise RunDirectoryError(
            f"there is no folder {folder}: there are no runs to show",
            next_step="Give the folder of runs: --runs DIR or SLURM_FORGE_RUNS.",
        )

    def listed() -> list[RunDirectory]:
        return chosen or [RunDirectory.at(folder / name) for name in names_in(folder)]

    slurm = SubprocessSlurm.of_this_process() if shutil.which("squeue") else None
    where = from_here(folder) if chosen is None else plural(len(chosen), "run")
    return where, Fleet(listed, folder, slurm)


async def carry_out(verb: Verb, row: TopRow) -> VerbResult:
    """Carry out what a key asks for: as the verb in a process of its own, whose words are shown."""
    import asyncio

    from slurm_forge.cli.monitoring.top_app import Verb, VerbResult

    if verb is Verb.RELEASE:
        return await asyncio.to_thread(_release, row)
    more = ("--tail", _LOG_LINES) if verb is Verb.LOGS else ()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "slurm_forge", verb.value, row.path, *more),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return VerbResult(process.returncode == 0, output.decode(errors="replace").strip())


def _release(row: TopRow) -> VerbResult:
    from slurm_forge.cli.monitoring.top_app import VerbResult
    from slurm_forge.errors import ForgeError
    from slurm_forge.slurm.client import SubprocessSlurm
    from slurm_forge.slurm.records import is_slurm_job

    if not is_slurm_job(row.job):
        return VerbResult(False, f"{row.name} has no Slurm job to release")
    try:
        SubprocessSlurm.of_this_process().release(row.job)
    except ForgeError as error:
        return VerbResult(False, str(error))
    return VerbResult(True, f"{row.name}: job {row.job} is released")
