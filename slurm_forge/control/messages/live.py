"""What a listener of ``doctor --live`` says on its output: one line per thing that happened."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

_MARK = "forge-live "
_KINDS = frozenset({"here", "saw", "died"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerEvent:
    """``here``: it listens; ``saw``: its handler ran; ``died``: it was killed, says its parent.

    ``way`` and ``host`` say which listener is meant, ``signal`` is a name, ``at`` seconds since the
    epoch on its node.
    """

    way: str
    host: str
    what: str
    at: float
    signal: str = ""


def format_event(event: ListenerEvent) -> bytes:
    """The line, with its end."""
    return f"{_MARK}{json.dumps(asdict(event))}\n".encode()


def parse_event(line: str) -> ListenerEvent | None:
    """What a line says; None for one that is somebody else's, torchrun's for one."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        body = json.loads(text)
        event = ListenerEvent(
            way=str(body["way"]),
            host=str(body["host"]),
            what=str(body["what"]),
            at=float(body["at"]),
            signal=str(body["signal"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return event if event.what in _KINDS else None
