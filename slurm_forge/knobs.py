"""The environment variables of slurm_forge itself, and of launchers other than Slurm: one place.

Slurm's own variables are read in ``slurm_forge.slurm.environment``; nothing else reads any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.errors import ConfigError

__all__ = [
    "Knobs",
    "LocalRanks",
    "flight_recorder_variables",
    "mark_of_run",
    "torchrun_variables",
    "without_torchrun",
]

_CHANNEL = "SLURM_FORGE_CHANNEL"
_NONCE = "SLURM_FORGE_NONCE"
_ATTEMPT = "SLURM_FORGE_ATTEMPT"
_LAUNCH = "SLURM_FORGE_LAUNCH"
_STARTED = "SLURM_FORGE_STARTED"
_AGENTS = "SLURM_FORGE_AGENTS"
_AGENTS_NONCE = "SLURM_FORGE_AGENTS_NONCE"
_SHIELDS = "SLURM_FORGE_SHIELDS"
_SHIELDS_NONCE = "SLURM_FORGE_SHIELDS_NONCE"
_TORCHRUN = "SLURM_FORGE_TORCHRUN"
_LIFELINE = "SLURM_FORGE_LIFELINE"
_RUN = "SLURM_FORGE_RUN"
_LATEST = "SLURM_FORGE_LATEST"
_RESTARTS = "SLURM_FORGE_RESTARTS"
_SITE = "SLURM_FORGE_SITE"
_RUNS = "SLURM_FORGE_RUNS"
_NODES = "SLURM_FORGE_NODES"
#: Where a user's programs keep what they remember (XDG Base Directory Specification).
_STATE_HOME = "XDG_STATE_HOME"
#: Where their settings are (the same).
_CONFIG_HOME = "XDG_CONFIG_HOME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What the supervisor tells its ranks, and what a user may set.

    ``channel`` is ``host1,host2:port``; ``nonce`` is what everybody on it has to know; ``attempt``
    and ``launch`` are the numbers of those that a process belongs to; ``started`` is when the
    launch was begun (seconds since the epoch).  ``agents`` and ``agents_nonce`` are the same for
    the standing agents of a step.  ``shields`` and ``shields_nonce`` are the same for the shields,
    which stand between Slurm and a launcher of ranks.  ``torchrun`` is the step (``job.step``)
    whose ranks torchrun numbers.
    ``lifeline``: standard input is a pipe that ends when the run is to stop.  ``run`` is the
    directory of the run that ``slurm-forge exec`` conducts, ``latest`` the checkpoint that its
    program may resume from, ``restarts`` how often that was started before.  ``nodes`` is the
    folder of the node ledger, or ``off``.
    """

    channel: str | None = None
    nonce: str = ""
    attempt: int = 0
    launch: int = 0
    started: float | None = None
    agents: str | None = None
    agents_nonce: str = ""
    shields: str | None = None
    shields_nonce: str = ""
    torchrun: str | None = None
    lifeline: bool = False
    run: str | None = None
    latest: str | None = None
    restarts: int | None = None
    site: str | None = None
    runs: str | None = None
    nodes: str | None = None
    state_home: str | None = None
    config_home: str | None = None

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

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Knobs:
        """Read them; ``ConfigError`` for a number that is none."""
        return cls(
            channel=environ.get(_CHANNEL) or None,
            nonce=environ.get(_NONCE, ""),
            attempt=_number(environ, _ATTEMPT, 0),
            launch=_number(environ, _LAUNCH, 0),
            started=_seconds(environ, _STARTED),
            agents=environ.get(_AGENTS) or None,
            agents_nonce=environ.get(_AGENTS_NONCE, ""),
            shields=environ.get(_SHIELDS) or None,
            shields_nonce=environ.get(_SHIELDS_NONCE, ""),
            torchrun=environ.get(_TORCHRUN) or None,
            lifeline=_number(environ, _LIFELINE, 0) == 1,
            run=environ.get(_RUN) or None,
            latest=environ.get(_LATEST) or None,
            restarts=_number(environ, _RESTARTS, 0) if environ.get(_RESTARTS) else None,
            site=environ.get(_SITE) or None,
            runs=environ.get(_RUNS) or None,
            nodes=environ.get(_NODES) or None,
            state_home=environ.get(_STATE_HOME) or None,
            config_home=environ.get(_CONFIG_HOME) or None,
        )

    def to_environ(self) -> dict[str, str]:
        """The variables that hand this to a child process."""
        given = {
            _CHANNEL: self.channel,
            _NONCE: self.nonce,
            _ATTEMPT: str(self.attempt),
            _LAUNCH: str(self.launch),
            _STARTED: None if self.started is None else repr(self.started),
            _AGENTS: self.agents,
            _AGENTS_NONCE: self.agents_nonce,
            _SHIELDS: self.shields,
            _SHIELDS_NONCE: self.shields_nonce,
            _TORCHRUN: self.torchrun,
            _LIFELINE: "1" if self.lifeline else None,
            _RUN: self.run,
            _LATEST: self.latest,
            _RESTARTS: None if self.restarts is None else str(self.restarts),
            _SITE: self.site,
            _RUNS: self.runs,
            _NODES: self.nodes,
            _STATE_HOME: self.state_home,
            _CONFIG_HOME: self.config_home,
        }
        return {name: value for name, value in given.items() if value}


#: Nothing is there, and nothing can be.
_NOWHERE = Path("/dev/null")


def _of_user(given: str | None, usual: str) -> Path:
    """What the variable says, else the usual folder; never one below the current folder.

    The specification: a relative path there is to be ignored.  A user without a home folder (a
    number that nobody has named, in a container), or with a relative one, has none of these.
    """
    if given is not None and given.startswith("/"):
        return Path(given)
    try:
        found = Path(usual).expanduser()
    except RuntimeError:
        return _NOWHERE
    return found if found.is_absolute() else _NOWHERE


def torchrun_variables(step: str, *, ours: bool) -> dict[str, str]:
    """What torchrun and its ranks have in their environment in the step ``job.step``.

    Where the ranks are ``ours``, also those of torchrun's own options that keep it from ending
    ranks which are about to save; versions that don't know them don't read them.
    """
    if not ours:
        return {_TORCHRUN: step}
    return {
        _TORCHRUN: step,
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
    if _TORCHRUN not in environ:
        return dict(environ)
    ours = torchrun_variables("", ours=True).keys()
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_TORCHRUN | ours and not name.startswith("TORCHELASTIC_")
    }


def mark_of_run(path: str) -> str:
    """What the processes that were started for the run at ``path`` have in their environment."""
    return f"{_RUN}={path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """Which of how many processes this is, where no Slurm step says so."""

    rank: int
    local_rank: int
    world_size: int
    job: str
    #: What tells one start of torchrun's from any other; empty where it is not torchrun's.
    torchrun: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> LocalRanks:
        """From submitit's local executor, else torchrun's variables, else a single process."""
        if "SUBMITIT_LOCAL_JOB_ID" in environ:
            return cls(
                rank=_number(environ, "SUBMITIT_LOCAL_GLOBALID", 0),
                local_rank=_number(environ, "SUBMITIT_LOCAL_LOCALID", 0),
                world_size=_number(environ, "SUBMITIT_LOCAL_NTASKS", 1),
                job="local-" + environ["SUBMITIT_LOCAL_JOB_ID"],
            )
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return cls(
                rank=_number(environ, "RANK", 0),
                local_rank=_number(environ, "LOCAL_RANK", 0),
                world_size=_number(environ, "WORLD_SIZE", 1),
                job="torchrun-" + environ.get("TORCHELASTIC_RUN_ID", "none"),
                torchrun=_start_of_torchrun(environ),
            )
        return cls(rank=0, local_rank=0, world_size=1, job="process")


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


def flight_recorder_variables(folder: str, given: Mapping[str, str]) -> dict[str, str]:
    """What makes NCCL's flight recorder write into ``folder`` on demand; nothing of what is given.

    None at all where the user has said where it writes.
    """
    if _RECORDER_PIPE in given or any(name in given for name in _RECORDER_FILES):
        return {}
    wanted = {
        _RECORDER_PIPE: f"{folder}/pipe-",
        **dict.fromkeys(_RECORDER_FILES, f"{folder}/trace-"),
        **dict.fromkeys(_RECORDER_SIZES, "2000"),
    }
    return {name: value for name, value in wanted.items() if name not in given}


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None or text == "":
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 12:
        raise _not_a_number(name, text)
    return int(text)


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _not_a_number(name, text)
    return value


def _not_a_number(name: str, text: str) -> ConfigError:
    return ConfigError(
        f"the environment variable {name} is {text!r}, not a number",
        next_step=f"Unset {name}, or start the program through slurm-forge.",
    )
