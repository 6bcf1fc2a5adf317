"""Which signal tells a program to save, and which processes get it.  Pure.

docs/how-to/exec.md describes what each convention really does, with its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from slurm_forge.spec.launchers import Convention, NotifyTo, ProgramSpec

#: What torchrun's agent passes on to its workers by default (torch/distributed/run.py); of
#: anything else it dies, and its workers with it.
_TORCHRUN_PASSES_ON = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish"})
_TORCHRUNS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
#: Programs that start another and are nothing themselves.
_WRAPPERS = frozenset({
    "env", "nice", "ionice", "numactl", "taskset", "timeout", "time", "stdbuf", "setsid", "nohup",
    "xargs", "make", "conda", "mamba", "micromamba", "uv", "poetry", "pixi", "pipenv", "apptainer",
    "singularity", "enroot", "mpirun", "mpiexec", "orterun", "prterun", "accelerate", "deepspeed",
    "accelerate.commands.launch", "deepspeed.launcher.launch", "deepspeed.launcher.runner",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forwarding:
    """The signal, whom it goes to, and whether also to those that Slurm has sent it already."""

    signal: str
    to: NotifyTo
    again: bool = False


_SIGNALS = {
    Convention.LIGHTNING: "SIGUSR1",
    Convention.SUBMITIT: "SIGUSR2",
}


def forwarding(program: ProgramSpec, command: Sequence[str]) -> Forwarding:
    """What the user says, else the convention, else what the command looks like."""
    name = program.notify or _SIGNALS.get(program.convention, "SIGTERM")
    to = program.notify_to
    if to is None:
        to = _whom(program.convention, command, name)
    return Forwarding(name, to, program.notify_again)


def _whom(convention: Convention, command: Sequence[str], name: str) -> NotifyTo:
    if starts_steps(command):
        return NotifyTo.RANKS
    if convention is Convention.TORCHRUN or _is_torchrun(command):
        # Its agent saves nothing: it only passes on, and only these.
        return NotifyTo.CHILD if name in _TORCHRUN_PASSES_ON else NotifyTo.TREE
    if is_starter(command):
        return NotifyTo.TREE
    return NotifyTo.CHILD


def starts_steps(command: Sequence[str]) -> bool:
    """Whether it is srun: its tasks are signalled by Slurm, and srun itself must not be."""
    return bool(command) and PurePath(command[0]).name == "srun"


def is_shell(command: Sequence[str]) -> bool:
    """Whether it is a shell, which runs no trap while it waits for a program."""
    return bool(command) and PurePath(command[0]).name.lstrip("-") in _SHELLS


def is_starter(command: Sequence[str]) -> bool:
    """Whether a process only starts others: what is to hear of the notice is below it."""
    if not command:
        return False
    name = PurePath(command[0]).name.lstrip("-")
    return name in _SHELLS | _WRAPPERS or _python_program(command) in _TORCHRUNS | _WRAPPERS


def _is_torchrun(command: Sequence[str]) -> bool:
    first = PurePath(command[0]).name if command else ""
    return first in _TORCHRUNS or _python_program(command) in _TORCHRUNS


def _python_program(command: Sequence[str]) -> str:
    """The module or script that a Python was started with, without its folder; else empty."""
    if not command or not PurePath(command[0]).name.startswith("python"):
        return PurePath(command[0]).name if command else ""
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, "")
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            next(words, None)
        elif word.startswith("-m"):
            return word[2:]
        elif word.startswith("-c"):
            return ""
        elif not word.startswith("-"):
            return PurePath(word).name
    return ""
