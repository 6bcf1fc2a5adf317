"""One case of the matrix: what strikes where, how a path is tried, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.crash.disk import Loss
from tests.crash.shim import Shim, Strike, Watch


@dataclass(frozen=True, slots=True)
class Case:
    """``strike`` at call ``call`` of rank ``victim`` on the path of that name."""

    path: str
    strike: Strike
    victim: int
    call: int
    seed: int = 0
    #: Which power losses the disk is looked at after; empty where power stays on.
    losses: tuple[Loss, ...] = ()


#: The kinds of faults that leave power on, as the table shows them.
KINDS: Mapping[Strike, str] = {
    Strike.KILL_BEFORE: "kill before",
    Strike.KILL_AFTER: "kill after",
    Strike.TORN: "torn",
    Strike.ENOSPC_ONCE: "ENOSPC once",
    Strike.ENOSPC_STICKY: "ENOSPC sticky",
    Strike.EIO_ONCE: "EIO once",
    Strike.EIO_STICKY: "EIO sticky",
    Strike.REPEATED: "answer lost",
}
AFTER_ACK = "after ack: "


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank says: how the act ended, and how it went on when the fault was gone.

    ``outcome``: "done", "refused …", "lost …" or "crashed …".  ``refused``: what it was told did
    not work.  ``problems``: what should not have happened.
    """

    outcome: str
    refused: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    #: What a restart would find, or what a resume gave under the fault.
    found: int | None = None


class LostError(Exception):
    """This rank ends its life at once, as a launch that has lost a rank does: peers notice."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report


@dataclass(frozen=True, slots=True)
class Look:
    """What a restart finds: ``value``, what is wrong with that, what of it was acknowledged."""

    value: int | None
    wrong: str = ""
    lost: bool = False
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One injection and what came of it."""

    path: str
    kind: str
    rank: int
    call: int
    site: str
    state: str = ""
    wrong: str = ""
    lost: bool = False
    blocked: str = ""
    hang: bool = False
    passed_over: tuple[str, ...] = ()
    escaped: bool = False
    direct_writes: int = 0

    @property
    def bad(self) -> bool:
        """Whether anything about it is not as it must be."""
        return bool(self.wrong or self.lost or self.blocked or self.hang)


class Way(Protocol):
    """A path through the code that faults are injected into."""

    name: str
    ranks: int
    watch: Watch
    strikes: tuple[Strike, ...]
    power: bool

    def body(self, rank: int, case: Case, shim: Shim) -> Report:
        """Run on every rank: have something acknowledged, arm, act, go on if possible."""

    def look(
        self, root: Path, acked: Sequence[int], possible: Sequence[int], *, power: bool
    ) -> Look:
        """Restart: what is there must hold ``acked`` and may hold ``possible``."""

    def next_attempt(self, root: Path) -> tuple[int, list[str]]:
        """Do the same again as a later attempt would: the value acknowledged, and what is wrong."""

    def possible(self, acked: Sequence[int], reports: Sequence[Report | None]) -> list[int]:
        """What may be there without having been acknowledged."""

    def look_after(self, reports: Sequence[Report]) -> str:
        """What is wrong about what the ranks say, when all of them lived."""
