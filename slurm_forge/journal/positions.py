"""How far an attempt had read the journal when it began."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WriterPosition:
    """The last record of a writer's file that had been read, by its sequence number."""

    writer: str
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPosition:
    """What had been read of the files of attempt ``since`` and of later ones.

    ``since`` is the newest attempt that was known to have begun, 0 for none.  What counts of the
    attempts before it, it has settled by itself.  A writer that is not listed had written nothing.
    """

    since: int
    writers: tuple[WriterPosition, ...] = ()
