"""Words of a later version in an event: an unknown cause is ``unknown``, an action ``hold``.

Each such word has a place that is safe to take for it; a kind has none, and is counted alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from slurm_forge.journal.events import UnknownEvent

_Path: TypeAlias = "tuple[int | str, ...]"

#: By the name of the field: what an unknown word in it is taken for.
_TAKEN_FOR: Mapping[str, str] = {
    "cause": "unknown",
    "action": "hold",
    "confidence": "guess",
    "trust": "suspect",
    "affects": "science",
}
_LONGEST = 64
#: Any event that is no word of a later version stands where its kind is unknown.
_ANY = {"kind": "note", "text": ""}


def later_event(
    event: Mapping[str, Any], errors: Iterable[Mapping[str, Any]], by: str
) -> tuple[Mapping[str, Any], UnknownEvent | None]:
    """What to read in the place of an event that has unknown words.

    Args:
        event: The event as it was written.
        errors: What pydantic said of its line.
        by: The version of slurm_forge that wrote it.

    Returns:
        The event with known words, or any event and the ``UnknownEvent`` that it is.
    """
    paths: list[_Path] = []
    for error in errors:
        if error["type"] == "union_tag_invalid":
            return _ANY, UnknownEvent(kind=str(event.get("kind"))[:_LONGEST], by=by)
        if error["type"] == "enum":
            # The place in the line begins with ``event`` and the kind.
            paths.append(tuple(error["loc"])[2:])
    for path in paths:
        event = _with_known_word(event, path)
    return event, None


def _with_known_word(event: Mapping[str, Any], path: _Path) -> Mapping[str, Any]:
    field = path[-1] if path else ""
    taken_for = _TAKEN_FOR.get(field) if isinstance(field, str) else None
    if taken_for is None:
        return event
    word = _value(event, path)
    if not isinstance(word, str) or not word:
        return event
    event = _with_value(event, path, taken_for)
    told = f"{field} {word[:_LONGEST]!r} is of a later slurm_forge: taken for {taken_for}"
    return _noted(event, path, told)


def _noted(event: Mapping[str, Any], path: _Path, told: str) -> Mapping[str, Any]:
    """With the word as it was, where people read about it."""
    match path:
        case ("incident", _):
            seen = _value(event, ("incident", "evidence"))
            more = [*(seen if isinstance(seen, list) else []), {"source": "journal", "text": told}]
            return _with_value(event, ("incident", "evidence"), more)
        case ("decision", _):
            reason = _value(event, ("decision", "reason"))
            return _with_value(event, ("decision", "reason"), f"{reason} ({told})")
        case _ if "reason" in event:
            return {**event, "reason": f"{event['reason']} ({told})"}
        case _:
            return event


def _value(body: Any, path: _Path) -> Any:
    for key in path:
        try:
            body = body[key]
        except (KeyError, IndexError, TypeError):
            return None
    return body


def _with_value(event: Mapping[str, Any], path: _Path, value: object) -> Mapping[str, Any]:
    changed: Mapping[str, Any] = _replaced(event, path, value)
    return changed


def _replaced(body: Any, path: _Path, value: Any) -> Any:
    if not path:
        return value
    first, *rest = path
    inner = _replaced(_value(body, (first,)), tuple(rest), value)
    if isinstance(body, list) and isinstance(first, int):
        return [*body[:first], inner, *body[first + 1 :]]
    return {**body, first: inner}
