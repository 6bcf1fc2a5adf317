"""Where the output of the batch step and of single ranks lies, as we and srun were told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from slurm_forge.slurm.environment import SlurmEnvironment

_ERRORS = ("--error", "-e")
_OUTPUT = ("--output", "-o")


@dataclass(frozen=True, slots=True)
class Output:
    """A file, and where in it what counts begins, in bytes."""

    path: Path
    since: int = 0


def own_output() -> Output | None:
    """The file that this process writes its errors to, from here on; None where that is none."""
    try:
        target = Path("/proc/self/fd/2").readlink()
        if not target.is_absolute() or not target.is_file():
            return None
        return Output(target, os.fstat(2).st_size)
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class RankOutput:
    """The files that srun was told to write the ranks' output to (none: it passes it on to us)."""

    payload: Sequence[str]
    environment: SlurmEnvironment

    def path(self, rank: int) -> Path | None:
        """Of one rank, its errors where they have a file of their own.

        %j, %J, %A, %a and %t are filled in (srun man page, IO redirection); with anything else in
        the name it is not known.
        """
        pattern = self._option(_ERRORS) or self._option(_OUTPUT)
        if pattern is None:
            return None
        variables = self.environment
        of_array = variables.job_id if variables.array_job_id is None else variables.array_job_id
        for sign, value in (
            ("%j", variables.job_id),
            ("%A", of_array),
            ("%a", variables.array_task_id),
            ("%t", rank),
        ):
            pattern = pattern.replace(sign, str(value))
        return None if "%" in pattern else Path(pattern)

    def _option(self, names: tuple[str, ...]) -> str | None:
        words = list(self.payload)
        for word, value in pairwise(words):
            if word in names:
                return value
        for word in words:
            name, separator, value = word.partition("=")
            if separator and name in names:
                return value
        return None
