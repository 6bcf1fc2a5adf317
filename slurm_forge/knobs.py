"""The environment variables of slurm_forge itself, and of launchers other than Slurm: one place.

Slurm's own variables are interpreted by ``slurm_forge.slurm.environment``.  Entry points pass
``os.environ`` or ``process_environ()`` to these two modules; no other interprets a variable.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slurm_forge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Knob:
    """One variable: its name, how its text is read, and what it means to whom.

    ``for_users``: a person sets it; all others are handed from process to process.
    """

    name: str
    read: Callable[[str], str | int | float | bool]
    meaning: str
    for_users: bool = False


def _knob(
    name: str,
    read: Callable[[str], str | int | float | bool],
    default: Any,
    meaning: str,
    *,
    for_users: bool = False,
) -> Any:
    return field(default=default, metadata={"knob": Knob(name, read, meaning, for_users)})


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 12:
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _switch(text: str) -> bool:
    return _number(text) == 1


def process_environ() -> Mapping[str, str]:
    """Copy of this process's environment, for whoever needs to be given one."""
    return dict(os.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What the supervisor tells its ranks, and what a user may set: a row for each variable."""

    # fmt: off
    site: str | None = _knob(
        "SLURM_FORGE_SITE", str, None, for_users=True,
        meaning="Name or file of the site, as `--site`; overrides `site:` of settings.")
    runs: str | None = _knob(
        "SLURM_FORGE_RUNS", str, None, for_users=True,
        meaning="Folder of runs, as `--runs`; else `runs:` of settings, else `./runs`.")
    nodes: str | None = _knob(
        "SLURM_FORGE_NODES", str, None, for_users=True,
        meaning="Folder of the node ledger, or `off` (docs/how-to/nodes.md).")
    config_home: str | None = _knob(
        "XDG_CONFIG_HOME", str, None, for_users=True,
        meaning="Where your settings and site files are (XDG): the folder `slurm_forge` in it; "
        "else `~/.config`.")
    state_home: str | None = _knob(
        "XDG_STATE_HOME", str, None, for_users=True,
        meaning="Folder for the state of your programs (XDG); else `~/.local/state`.")
    channel: str | None = _knob(
        "SLURM_FORGE_CHANNEL", str, None, "The control channel: `host1,host2:port`.")
    nonce: str = _knob(
        "SLURM_FORGE_NONCE", str, "", "Which launch the control channel is that of.")
    secret: str = _knob(
        "SLURM_FORGE_SECRET", str, "", "By which the processes of an attempt prove to each other "
        "that they belong to it ([security](../explanation/security.md)); ranks remove it from "
        "their environment.")
    attempt: int = _knob(
        "SLURM_FORGE_ATTEMPT", _number, 0, "The attempt that a process belongs to.")
    launch: int = _knob(
        "SLURM_FORGE_LAUNCH", _number, 0, "The launch that a process belongs to.")
    started: float | None = _knob(
        "SLURM_FORGE_STARTED", _seconds, None,
        "When the launch was begun (seconds since the epoch).")
    agents: str | None = _knob(
        "SLURM_FORGE_AGENTS", str, None, "The channel of the agents of a step: `host1,host2:port`.")
    agents_nonce: str = _knob(
        "SLURM_FORGE_AGENTS_NONCE", str, "", "Which step the agents' channel is that of.")
    relay: bool = _knob(
        "SLURM_FORGE_RELAY", _switch, False, for_users=True,
        meaning="1: the ranks of a node share one connection to the supervisor, as they do from "
        "512 ranks on.")
    shields: str | None = _knob(
        "SLURM_FORGE_SHIELDS", str, None,
        "The channel of the shields, which run between Slurm and a launcher of ranks.")
    shields_nonce: str = _knob(
        "SLURM_FORGE_SHIELDS_NONCE", str, "", "Which step the shields' channel is that of.")
    torchrun: str | None = _knob(
        "SLURM_FORGE_TORCHRUN", str, None, "The step (`job.step`) whose ranks torchrun numbers.")
    lifeline: bool = _knob(
        "SLURM_FORGE_LIFELINE", _switch, False,
        "Standard input is a pipe that ends when the run is to stop.")
    run: str | None = _knob(
        "SLURM_FORGE_RUN", str, None, "The directory of the run that `slurm-forge exec` conducts.")
    latest: str | None = _knob(
        "SLURM_FORGE_LATEST", str, None, "The checkpoint that the program may resume from.")
    restarts: int | None = _knob(
        "SLURM_FORGE_RESTARTS", _number, None, "How often the program was started before.")
    # fmt: on

    @property
    def config_folder(self) -> Path:
        """Where this user's settings and site files lie (XDG Base Directory Specification)."""
        return _of_user(self.config_home, "~/.config") / "slurm_forge"

    @property
    def state_folder(self) -> Path:
        """Where what is remembered for this user lies (the same)."""
        return _of_user(self.state_home, "~/.local/state") / "slurm_forge"

    @property
    def settings_file(self) -> Path:
        """The user's own settings, whether there are any or not (docs/how-to/configuration.md)."""
        return self.config_folder / "config.yaml"

    @property
    def targets_file(self) -> Path:
        """The URLs of the user's notification targets, for nobody else to read."""
        return self.config_folder / "notify.yaml"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Knobs:
        """Read them; ``ConfigError`` for a number that is none."""
        values = {
            name: _read(environ, knob) for name, knob in KNOBS.items() if environ.get(knob.name)
        }
        return cls(**values)

    def to_environ(self) -> dict[str, str]:
        """The variables that hand this to a child process."""
        values = {knob.name: getattr(self, name) for name, knob in KNOBS.items()}
        return {
            name: "1" if value is True else str(value)
            for name, value in values.items()
            if value is not None and value is not False and value != ""
        }


#: By the field of ``Knobs``.
KNOBS: dict[str, Knob] = {each.name: each.metadata["knob"] for each in fields(Knobs)}


def _read(environ: Mapping[str, str], knob: Knob) -> Any:
    text = environ[knob.name]
    try:
        return knob.read(text)
    except ValueError:
        raise ConfigError(
            f"the environment variable {knob.name} is {text!r}, not a number",
            next_step=f"Unset {knob.name}, or start the program through slurm-forge.",
        ) from None


#: Nothing is there, and nothing can be.
_NOWHERE = Path("/dev/null")


def _of_user(folder: str | None, usual: str) -> Path:
    """What the variable says, else the usual folder; never one below the current folder.

    The specification: a relative path there is to be ignored.  A user without a home folder (a
    number that nobody has named, in a container), or with a relative one, has none of these.
    """
    if folder is not None and folder.startswith("/"):
        return Path(folder)
    try:
        path = Path(usual).expanduser()
    except RuntimeError:
        return _NOWHERE
    return path if path.is_absolute() else _NOWHERE


def torchrun_variables(step: str, *, own_step: bool) -> dict[str, str]:
    """What torchrun and its ranks have in their environment in the step ``job.step``.

    With ``own_step`` (the ranks are slurm_forge's) also torchrun's options that keep it from ending
    ranks which are about to save; versions that don't know them don't read them.
    """
    if not own_step:
        return {KNOBS["torchrun"].name: step}
    return {
        KNOBS["torchrun"].name: step,
        "PET_SIGNALS_TO_HANDLE": "SIGINT",
        "PET_SHUTDOWN_TIMEOUT": "5",
        "PET_MONITOR_INTERVAL": "0.2",
    }


#: What torchrun gives its ranks (torch/distributed/elastic/agent/server/local_elastic_agent.py).
_OF_TORCHRUN = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip


def without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank that torchrun has started in a step of ours, without all of it.

    Any other comes back as it is: what it holds of torchrun is a person's own.
    """
    if KNOBS["torchrun"].name not in environ:
        return dict(environ)
    own = torchrun_variables("", own_step=True).keys()
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_TORCHRUN | own and not name.startswith("TORCHELASTIC_")
    }


def mark_of_run(path: str) -> str:
    """What the processes that were started for the run at ``path`` have in their environment."""
    return f"{KNOBS['run'].name}={path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """Which of how many processes this is, where no Slurm step says so."""

    rank: int
    local_rank: int
    world_size: int
    job: str
    #: Whether all of them are known to be on this machine.
    one_node: bool = False
    #: What tells one start of torchrun's from any other; empty where it is not torchrun's.
    torchrun: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> LocalRanks:
        """From submitit's local executor, else torchrun's variables, else a single process."""
        if "SUBMITIT_LOCAL_JOB_ID" in environ:
            return cls(
                rank=_number_of(environ, "SUBMITIT_LOCAL_GLOBALID", 0),
                local_rank=_number_of(environ, "SUBMITIT_LOCAL_LOCALID", 0),
                world_size=_number_of(environ, "SUBMITIT_LOCAL_NTASKS", 1),
                job="local-" + environ["SUBMITIT_LOCAL_JOB_ID"],
                one_node=True,
            )
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return cls(
                rank=_number_of(environ, "RANK", 0),
                local_rank=_number_of(environ, "LOCAL_RANK", 0),
                world_size=_number_of(environ, "WORLD_SIZE", 1),
                job="torchrun-" + environ.get("TORCHELASTIC_RUN_ID", "none"),
                one_node=environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"],
                torchrun=_start_of_torchrun(environ),
            )
        return cls(rank=0, local_rank=0, world_size=1, job="process")


def _number_of(environ: Mapping[str, str], name: str, default: int) -> int:
    return int(_read(environ, Knob(name, _number, ""))) if environ.get(name) else default


def _start_of_torchrun(environ: Mapping[str, str]) -> str:
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    if names[0] not in environ:
        return ""
    # It becomes part of a file's name.
    text = "-".join(environ.get(name, "") for name in names)
    return "".join(each if each.isalnum() or each in "-_" else "_" for each in text)[:80]


#: torch's own: where its flight recorder writes, and the pipe that makes it do so.
_RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RECORDER_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def flight_recorder_variables(folder: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What makes NCCL's flight recorder write into ``folder`` on demand; nothing of what is given.

    None at all where the user has said where it writes.
    """
    if _RECORDER_PIPE in environment or any(name in environment for name in _RECORDER_FILES):
        return {}
    wanted = {
        _RECORDER_PIPE: f"{folder}/pipe-",
        **dict.fromkeys(_RECORDER_FILES, f"{folder}/trace-"),
        **dict.fromkeys(_RECORDER_SIZES, "2000"),
    }
    return {name: value for name, value in wanted.items() if name not in environment}
