"""What a listener of ``doctor --live`` says on its output: one line per thing that happened."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["Told", "hear", "line_of"]

_MARK = "forge-live "
_KINDS = frozenset({"here", "saw", "died"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """``here``: it listens; ``saw``: its handler ran; ``died``: it was killed, says its parent.

    ``way`` and ``host`` say which listener is meant, ``signal`` is a name, ``at`` seconds since the
    epoch on its node.
    """

    way: str
    host: str
    what: str
    at: float
    signal: str = ""


def line_of(told: Told) -> bytes:
    """The line, with its end."""
    return f"{_MARK}{json.dumps(asdict(told))}\n".encode()


def hear(line: str) -> Told | None:
    """What a line says; None for one that is somebody else's, torchrun's for one."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        said = json.loads(text)
        told = Told(
            way=str(said["way"]),
            host=str(said["host"]),
            what=str(said["what"]),
            at=float(said["at"]),
            signal=str(said["signal"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return told if told.what in _KINDS else None
