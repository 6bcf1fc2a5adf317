"""Where a value sits in a document, and how that is written for people."""

from __future__ import annotations

import json
import re

__all__ = ["KeyPath", "dotted"]

#: Keys of mappings and indices of lists, from the top.
KeyPath = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")


def dotted(path: KeyPath) -> str:
    """Text of a path as people write it: ``recovery.cuda_oom[0].times``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part[:64])}]"
    return text
