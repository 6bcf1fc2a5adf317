"""What is known of Slurm's versions, and what was met that is not.

Imports nothing of Slurm's records: the parsers below it use this table.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Unrecognized"]


@dataclass(frozen=True, slots=True)
class Unrecognized:
    """A variable, field, state or reason of Slurm's that is not understood here, with its value."""

    name: str
    value: str

    def __str__(self) -> str:
        shown = self.value if len(self.value) <= 60 else self.value[:57] + "…"
        return f"{self.name}={shown!r}"
