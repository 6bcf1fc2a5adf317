"""A change that a person made to the job of a run that exists: key, old value, new value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

#: How ``JobChange`` calls the code that a run is made of; not the section ``code`` of its job file.
CODE = "code"
#: How the line of a difference ends that somebody made on purpose.
ON_PURPOSE = " (changed on purpose)"


class ChangeEffect(str, Enum):
    """What a changed key of a job file may affect."""

    #: The result: arguments, entry, seed, batch size, and every key that is not known better.
    SCIENCE = "science"
    #: How many processes compute it, and what Slurm is asked for.
    RESOURCES = "resources"
    #: How the run is kept alive and looked after.
    OPERATION = "operation"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """One key of the job file with both values as text; None is "not set".

    ``global_batch`` is not a key of the job file: it is the batch size that the program passes to
    ``run.batches``.
    """

    key: str
    old: str | None = None
    new: str | None = None
    affects: ChangeEffect = ChangeEffect.SCIENCE

    def __str__(self) -> str:
        return f"{self.key} {_or_not_set(self.old)} → {_or_not_set(self.new)}"


def _or_not_set(value: str | None) -> str:
    return "not set" if value is None else value
