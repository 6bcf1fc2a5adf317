"""What the agent's workers run: our worker, or a module by name."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_forge.errors import ForgeError
from slurm_forge.process import process_words
from slurm_forge.training.parking import ParkingPlace

__all__ = ["Program", "program_of"]


@dataclass(frozen=True, slots=True)
class Program:
    """What a worker runs: our worker, or a module by name with arguments (``python -m``)."""

    run: str
    module: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The same as a command, for a process of its own."""
        if self.module:
            return (sys.executable, "-u", "-m", self.module, *self.arguments)
        return (sys.executable, "-u", *process_words("worker", self.run))

    def go(self, parking: ParkingPlace) -> None:
        """Run it in this process; ours never returns, and only ours can go on in it."""
        if self.module:
            sys.argv = [self.module, *self.arguments]
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        else:
            from slurm_forge.training.worker import main as be_a_rank

            be_a_rank([self.run], parking)


def program_of(arguments: Sequence[str]) -> Program:
    """``RUN [-- -m MODULE ARGUMENTS…]``; ``ForgeError`` for anything else."""
    run, *rest = arguments or [""]
    if run and not rest:
        return Program(run)
    if run and len(rest) >= 3 and rest[:2] == ["--", "-m"]:
        return Program(run, rest[2], tuple(rest[3:]))
    raise ForgeError(
        f"the agent was started with {list(arguments)}",
        next_step="python -m slurm_forge.process agent RUN [-- -m MODULE …]",
    )
