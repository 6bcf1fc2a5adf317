"""Writes down the classes whose values quote a signal, in the process that calls ``start``."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from types import FrameType
from typing import Any

VARIABLE = "FORGE_SIGNAL_TRACE"
_SIGNAL = "SIGTERM"
_seen: set[str] = set()


def start() -> None:
    """Look at all calls of this thread, and of those that it starts."""
    if VARIABLE in os.environ:
        threading.setprofile(_on_event)
        sys.setprofile(_on_event)


def _on_event(frame: FrameType, event: str, argument: Any) -> None:
    if event not in ("call", "return") or "/slurm_forge/" not in frame.f_code.co_filename:
        return
    for value in (argument,) if event == "return" else tuple(frame.f_locals.values()):
        kind = type(value)
        name = kind.__name__
        if name in _seen or not kind.__module__.startswith("slurm_forge."):
            continue
        if dataclasses.is_dataclass(kind) and _quotes(value):
            _seen.add(name)
            with open(os.environ[VARIABLE], "a") as names:  # noqa: PTH123
                names.write(f"{name}\n")


def _quotes(value: Any) -> bool:
    """Whether a text of its own has the signal, not one of a value inside."""
    for field in dataclasses.fields(value):
        inside = getattr(value, field.name, None)
        for text in inside if isinstance(inside, tuple) else (inside,):
            if isinstance(text, str) and _SIGNAL in text:
                return True
    return False
