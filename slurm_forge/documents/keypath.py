"""Where a value sits in a document, and how that is written for people."""

from __future__ import annotations

import json
import re

#: Keys of mappings and indices of lists, from the top.
KeyPath = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: One key or index of a dotted path; what is no plain key stands quoted in brackets, as in JSON.
_PART = re.compile(
    r"(?P<key>(?:^|\.)[A-Za-z0-9_-]+)|\[(?P<index>[0-9]{1,6})\]"
    r'|\[(?P<quoted>"(?:[^"\\]|\\.)*")\]'
)


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


def leading(text: str) -> tuple[KeyPath, str]:
    """The path that a text begins with, as ``dotted`` writes it, and what follows it."""
    parts: list[str | int] = []
    at = 0
    while (match := _PART.match(text, at)) is not None:
        if match["key"] is not None:
            if not parts and match["key"].startswith("."):
                break
            parts.append(match["key"].lstrip("."))
        elif match["index"] is not None:
            parts.append(int(match["index"]))
        else:
            key = _unquoted(match["quoted"])
            if key is None:
                break
            parts.append(key)
        at = match.end()
    return tuple(parts), text[at:]


def _unquoted(text: str) -> str | None:
    """The key that a JSON text stands for; None for what is none, such as half a surrogate pair."""
    try:
        key = str(json.loads(text))
        key.encode()
    except ValueError:
        return None
    return key
