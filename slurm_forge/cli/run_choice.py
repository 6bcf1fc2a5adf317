"""Which run, which folder of runs, which site a person means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_forge.errors import ForgeError, RunDirectoryError
from slurm_forge.files import is_file
from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.run_directory import RunDirectory

if TYPE_CHECKING:
    from slurm_forge.node_ledger import NodeLedger
    from slurm_forge.site.loading import SitePlaces
    from slurm_forge.site.model import Site
    from slurm_forge.spec.layers import PlaceSetting
    from slurm_forge.spec.sweep_runs import SweepFile

_DEFAULT = Path("runs")


def runs_folder(
    option: Path | None, setting: PlaceSetting | None = None, *, begun: bool = False
) -> Path:
    """``--runs``, else SLURM_FORGE_RUNS, else ``runs:`` of the settings, else ``./runs``.

    ``setting`` is what the files of settings of a job say; without it, the user's own is asked, but
    not from a job that may have ``begun`` its run.
    """
    return runs_chosen(option, setting, begun=begun)[0]


def runs_chosen(
    option: Path | None, setting: PlaceSetting | None = None, *, begun: bool = False
) -> tuple[Path, str]:
    """As ``runs_folder``, and what names it."""
    if option is not None:
        return option.expanduser(), "--runs"
    knobs = Knobs.from_environ(process_environ())
    if knobs.runs is not None:
        return Path(knobs.runs).expanduser(), "SLURM_FORGE_RUNS"
    if setting is None and not begun and os.path.lexists(knobs.settings_file):
        from slurm_forge.spec.layers import user_setting

        setting = user_setting(knobs, "runs")
    return (_DEFAULT, "default") if setting is None else (Path(setting.value), str(setting.place))


def find_run(wanted: str, runs: Path | None) -> RunDirectory:
    """The run of that name in the folder of runs, or at that path.

    Else the one of that name that was made by submitit's ``AutoExecutor`` in a folder here.
    """
    if "/" in wanted or wanted in (".", ".."):
        return RunDirectory.existing(wanted)
    folder = runs_folder(runs)
    try:
        return RunDirectory.existing(folder / wanted)
    except RunDirectoryError:
        if is_file(folder / wanted / "sweep.yaml"):
            raise RunDirectoryError(
                f"{wanted} is a sweep, and one run is asked for",
                next_step=f"Name one of its runs: {wanted}-0.  All of them: slurm-forge status "
                f"{wanted}",
            ) from None
        for here in (Path(wanted), *([] if runs is not None else [_DEFAULT / wanted])):
            if is_file(here / "run.yaml"):
                return RunDirectory.existing(here)
        matches = [] if runs is not None else _made_by_submitit(wanted)
        if len(matches) == 1:
            return RunDirectory.existing(matches[0])
        raise _no_such_run(wanted, folder) from None


def find_sweep(wanted: str, runs: Path | None) -> tuple[SweepFile, tuple[RunDirectory, ...]] | None:
    """The sweep of that name in the folder of runs, or at that path, and its runs; else None."""
    if "/" in wanted or wanted in (".", ".."):
        folder = Path(wanted).expanduser().absolute()
    else:
        folder = runs_folder(runs).absolute() / wanted
    if not is_file(folder / "sweep.yaml"):
        return None
    from slurm_forge.spec.sweep_runs import read_sweep_file

    sweep = read_sweep_file(folder)
    return sweep, tuple(RunDirectory.at(folder.parent / each.run) for each in sweep.runs)


def runs_meant(wanted: str, runs: Path | None) -> tuple[RunDirectory, ...]:
    """The run of that name or path, or all runs of the sweep."""
    sweep = find_sweep(wanted, runs)
    return (find_run(wanted, runs),) if sweep is None else sweep[1]


def reference(run: RunDirectory) -> str:
    """What to type for this run in the current folder: its name if that is enough."""
    try:
        usual = RunDirectory.at(runs_folder(None) / run.name).path
    except ForgeError:
        usual = None  # unreadable settings: reported to the person who types a name
    return run.name if usual == run.path else _shortest(run.path)


def site_places(setting: PlaceSetting | None = None, *, begun: bool = False) -> SitePlaces:
    """As ``launch.render.site_choice.site_places``, imported when it is needed."""
    from slurm_forge.launch.render.site_choice import site_places as places

    return places(setting, run_exists=begun)


def node_ledger(site: Site, cluster: str | None) -> NodeLedger:
    """The node ledger: SLURM_FORGE_NODES, else the site's, else one of the user's own."""
    from slurm_forge.launch.nodes.excluded_nodes import open_ledger

    knobs = Knobs.from_environ(process_environ())
    return open_ledger(knobs, cluster=cluster, of_site=site.node_ledger)


def state_folder() -> Path:
    """Where we keep what we remember for this user."""
    return Knobs.from_environ(process_environ()).state_folder


def from_here(path: Path) -> str:
    """A path relative to the current folder where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def run_names(folder: Path) -> list[str]:
    """Names of the runs in a folder; what begins with a dot is not yet one."""
    try:
        return sorted(
            p.name
            for p in folder.iterdir()
            if not p.name.startswith(".") and (p / "run.yaml").is_file()
        )
    except OSError:
        return []


def sweep_names(folder: Path, *, besides: Sequence[str]) -> list[str]:
    """Names of the sweeps in a folder, none of which is that of a run."""
    try:
        names = sorted({each.name for each in folder.iterdir()}.difference(besides))
    except OSError:
        return []
    return [
        name
        for name in names
        if not name.startswith(".") and (folder / name / "sweep.yaml").is_file()
    ]


def runs_of_submitit() -> list[Path]:
    """Folders of runs that submitit's executors have made in folders here: ``<folder>/runs``."""
    return sorted(path for path in Path().glob("*/runs") if run_names(path))


def _made_by_submitit(name: str) -> list[Path]:
    return [folder / name for folder in runs_of_submitit() if name in run_names(folder)]


def _shortest(path: Path) -> str:
    here = Path.cwd()
    return f"./{path.relative_to(here)}" if path.is_relative_to(here) else str(path)


def _no_such_run(wanted: str, folder: Path) -> RunDirectoryError:
    known = run_names(folder)
    if not known:
        return RunDirectoryError(
            f"there is no run {wanted!r}: {folder.absolute()} holds no runs",
            next_step="Give the path of the run, or the folder of runs: --runs DIR or "
            f"SLURM_FORGE_RUNS. {_SUBMITIT}",
        )
    import difflib

    close = difflib.get_close_matches(wanted, known, n=1)
    meant = f' (did you mean "{close[0]}"?)' if close else ""
    shown = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
    return RunDirectoryError(
        f"there is no run {wanted!r} in {folder.absolute()}{meant}",
        next_step=f"Runs there: {shown}. {_SUBMITIT}",
    )


_SUBMITIT = 'Runs of submitit\'s AutoExecutor(FOLDER, cluster="forge") lie in FOLDER/runs.'
