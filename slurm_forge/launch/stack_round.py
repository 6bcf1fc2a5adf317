"""Stacks of all ranks, asked for once, as evidence for a verdict that is there already."""

from __future__ import annotations

from collections.abc import Collection

from slurm_forge.control import Hub
from slurm_forge.control import protocol as p
from slurm_forge.control.stack_text import where
from slurm_forge.recovery.stalls import Look

__all__ = ["StackRound", "look_of"]

#: A witness that has not answered by then is as stuck as its rank.
_WITHIN_S = 3.0


def look_of(message: p.Stacks, now: float) -> Look:
    """What a witness has found, as it is judged."""
    return Look(
        at=now,
        state=message.state,
        cpu_s=message.cpu_s,
        where=where(message.text),
        text=message.text,
        file=message.file,
        how=message.how,
    )


class StackRound:
    """``begin``, ``hear`` what witnesses find, ``over`` once all have answered or time is up.

    Rounds are numbered below zero: those of the watchdog are above.
    """

    def __init__(self, hub: Hub, *, attempt: int, launch: int) -> None:
        self._hub = hub
        self._attempt, self._launch = attempt, launch
        self._number = 0
        self._asked = 0.0
        #: What was found so far, by rank.
        self.looks: dict[int, Look] = {}

    def begin(self, now: float) -> None:
        """Ask every witness."""
        self._number -= 1
        self._asked, self.looks = now, {}
        self._hub.ask_witnesses(
            p.TakeStacks(id=self._number, attempt=self._attempt, launch=self._launch)
        )

    def hear(self, rank: int, message: p.Stacks, now: float) -> None:
        """A witness has found something; what belongs to another round is left alone."""
        if message.id == self._number:
            self.looks[rank] = look_of(message, now)

    def over(self, now: float, expected: Collection[int]) -> bool:
        """Whether those that can answer have, or have had time enough."""
        return set(expected) <= set(self.looks) or now - self._asked >= _WITHIN_S
