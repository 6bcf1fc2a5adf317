"""What a listener of ``doctor --live`` prints: one line per event."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

#: Prefix of each line, since others (torchrun, for one) print to the same output.
MARK = "forge-live "


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerEvent:
    """``here``: it listens; ``saw``: its handler ran; ``died``: killed, according to its parent.

    ``ended``: its whole step is over, which no listener reports.  ``way`` and ``host`` identify
    the listener, ``signal`` is a name, ``at`` seconds since the epoch on its node.
    """

    way: str
    host: str
    what: Literal["here", "saw", "died", "ended"]
    at: float
    signal: str = ""


def format_event(event: ListenerEvent) -> bytes:
    """The line, newline included."""
    return f"{MARK}{json.dumps(asdict(event))}\n".encode()
