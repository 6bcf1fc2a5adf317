"""What a listener of ``doctor --live`` says on its output: one line per thing that happened."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

#: In front of each line: others print beside them, torchrun for one.
MARK = "forge-live "


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerEvent:
    """``here``: it listens; ``saw``: its handler ran; ``died``: it was killed, says its parent.

    ``ended``: its whole step is over, which no listener reports.  ``way`` and ``host`` say
    which listener is meant, ``signal`` is a name, ``at`` seconds since the epoch on its node.
    """

    way: str
    host: str
    what: Literal["here", "saw", "died", "ended"]
    at: float
    signal: str = ""


def format_event(event: ListenerEvent) -> bytes:
    """The line, with its end."""
    return f"{MARK}{json.dumps(asdict(event))}\n".encode()
