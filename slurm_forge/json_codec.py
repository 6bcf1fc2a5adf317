"""Dataclasses as JSON and back: the one codec of what processes tell each other.

The journal has an adapter of its own: it has to tell a kind of a later version from damage.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar, overload

from pydantic import TypeAdapter

_T = TypeVar("_T")
_ENCODER = json.JSONEncoder(ensure_ascii=False)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@overload
def parse(kind: type[_T], text: str | bytes) -> _T: ...
@overload
def parse(kind: Any, text: str | bytes) -> Any: ...
def parse(kind: Any, text: str | bytes) -> Any:
    """The value of a dataclass, or of a union of them, that a text in JSON holds.

    Types are checked strictly; a field that ``kind`` does not have is ignored, unless the class
    forbids it.

    Raises:
        ValueError: The text is not JSON, or not a value of ``kind``.
    """
    return _adapter(kind).validate_json(text, strict=True)


@overload
def from_json(kind: type[_T], value: object) -> _T: ...
@overload
def from_json(kind: Any, value: object) -> Any: ...
def from_json(kind: Any, value: object) -> Any:
    """The same out of what ``json.loads`` made of the text."""
    return parse(kind, dumps(value))


def dumps(value: object) -> bytes:
    """Plain values as JSON in one line.

    A character that UTF-8 can't encode (half of one, out of a file's name) becomes ``?``: no reader
    of JSON takes it.
    """
    return _ENCODER.encode(value).encode(errors="replace")
