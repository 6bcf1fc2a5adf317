"""The key or value that somebody probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def nearest(
    key: str, choices: Iterable[str], aliases: Mapping[str, str] | None = None
) -> str | None:
    """The choice that ``key`` was probably meant to be, or ``None``.

    ``aliases`` maps names known from elsewhere to choices and comes first; dashes and capitals
    do not count, and the beginning of one choice alone is enough.
    """
    known = list(choices)
    plain = key.lower().lstrip("-").replace("-", "_")
    if aliases and plain in aliases:
        return aliases[plain]
    if plain in known:
        return plain
    begun = [choice for choice in known if choice.startswith(plain)]
    if len(plain) >= 3 and len(begun) == 1:
        return begun[0]
    close = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(key: str, choices: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """What to put behind a wrong word: the nearest right one, else the right ones."""
    known = list(choices)
    meant = nearest(key, known, aliases)
    if meant is not None:
        return f'(did you mean "{meant}"?)'
    return f"(known here: {', '.join(known)})" if known else "(nothing is known here)"
