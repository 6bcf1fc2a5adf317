"""What ``doctor`` examines: this machine, Slurm, the folder of runs.  Effects, no decisions."""

from __future__ import annotations

import grp
import os
import platform
import shutil
import time
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata, util
from pathlib import Path

from slurm_forge.cli.run_choice import run_names
from slurm_forge.errors import ForgeError
from slurm_forge.journal import RunState, fold, read_to_fold
from slurm_forge.knobs import process_environ
from slurm_forge.launch.render.save_times import save_note_in
from slurm_forge.person import person
from slurm_forge.recovery.policy.save_interval import advised_interval
from slurm_forge.report.doctor.slurm_section import Machine
from slurm_forge.report.doctor.storage_section import StorageFacts
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site, storage_at
from slurm_forge.site.usable import Person
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.process import run_command
from slurm_forge.slurm.survey import PATIENCE, Survey, take_survey
from slurm_forge.store.mounts import mount_of, read_mounts
from slurm_forge.store.quota import ask_quota
from slurm_forge.store.room import free_space
from slurm_forge.store.trying import try_folder

_COMMANDS = ("sbatch", "scontrol", "srun", "squeue", "sacct", "sacctmgr", "sinfo")
#: Of many runs the newest show the present state.
_MOST_RUNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRuns:
    """What this user's runs in the folder have seen, the newest of them."""

    states: tuple[RunState, ...] = ()

    @property
    def checkpoint(self) -> int | None:
        """Bytes of the largest of the newest checkpoints; None if there is none."""
        sizes = [state.known[-1].size for state in self.states if state.known]
        return max((size for size in sizes if size > 0), default=None)

    @property
    def save(self) -> timedelta | None:
        """The slowest of the newest saves; None without any."""
        took = [note.seconds for state in self.states if (note := save_note_in(state)) is not None]
        return timedelta(seconds=max(took)) if took else None


def look_at_machine() -> Machine:
    """Versions and commands; torch is looked up and not imported."""
    missing = tuple(name for name in _COMMANDS if shutil.which(name) is None)
    return Machine(
        python=platform.python_version(),
        slurm_forge=_version("slurm-forge") or _version("slurm_forge") or "?",
        torch=(_version("torch") or "?") if util.find_spec("torch") is not None else None,
        missing_commands=missing,
    )


def look_at_slurm(slurm: SubprocessSlurm | None = None) -> Survey:
    """Everything that Slurm reports about itself and this user."""
    client = SubprocessSlurm.of_this_process() if slurm is None else slurm
    return take_survey(client.with_timeout(PATIENCE), person())


def who(account: str | None = None) -> Person:
    """This user, for the rules of partitions."""
    names = set()
    for number in {*os.getgroups(), os.getgid()}:
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:
            continue  # a group without a name can't be in a list of names
    return Person(frozenset(names), account, os.getuid() == 0)


def look_at_storage(folder: Path, site: Site, checkpoint: int | None) -> StorageFacts:
    """The folder, or the nearest one above it that exists; a small file is written there."""
    absolute = folder.absolute()
    there = next((each for each in (absolute, *absolute.parents) if each.is_dir()), Path("/"))
    mount = mount_of(os.path.realpath(there), read_mounts())
    try:
        available = free_space(there)
    except OSError:
        available = None
    return StorageFacts(
        folder=str(absolute),
        exists=there == absolute,
        mount=mount,
        free_space=available,
        quota=ask_quota(mount, person(), run_command, process_environ(), shutil.which),
        tried=try_folder(there),
        purge=storage_at(site, absolute, process_environ()),
        checkpoint=checkpoint,
    )


def look_at_runs(folder: Path) -> EarlierRuns:
    """The journals of the newest runs in the folder, without unreadable ones."""
    runs_by_time: list[tuple[float, RunDirectory]] = []
    for name in run_names(folder):
        try:
            run = RunDirectory.existing(folder / name)
            runs_by_time.append((run.journal.stat().st_mtime, run))
        except (ForgeError, OSError):
            continue
    newest = sorted(runs_by_time, key=lambda each: each[0], reverse=True)[:_MOST_RUNS]
    states = []
    for _, run in newest:
        try:
            state = fold(read_to_fold(run))
            advised_interval((state,), now=now())
        except (ForgeError, OSError, OverflowError, ValueError):
            continue  # what holds times that no clock can show is no measure, either
        states.append(state)
    return EarlierRuns(states=tuple(states))


def now() -> float:
    """Seconds since 1970."""
    return time.time()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
