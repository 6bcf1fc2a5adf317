"""What every message on a control channel is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Message"]


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages; ``tag`` is the word on the wire."""

    tag: ClassVar[str] = ""
