"""A value of any type that is written down, every field filled: made from names and types alone.

So a kind of event, a message or a field that is new shows up in the golden files by itself.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import Any

NOW = datetime(2026, 11, 23, 12, 30, tzinfo=timezone.utc)
_NOTHING = type(None)


def kinds_of(union: Any) -> tuple[type, ...]:
    """The classes of ``A | B | …``, annotated or not."""
    while typing.get_origin(union) is typing.Annotated:
        union = typing.get_args(union)[0]
    return typing.get_args(union)


def sample(wanted: Any, name: str = "value") -> Any:
    """A value of the type; its texts and numbers follow from the names of the fields."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Annotated:
        return sample(inner[0], name)
    if origin is typing.Literal:
        return inner[0]
    if origin in (types.UnionType, typing.Union):
        return sample(next(each for each in inner if each is not _NOTHING), name)
    if origin is tuple and inner[-1] is Ellipsis:
        return (sample(inner[0], name),)
    if origin is tuple:
        return tuple(sample(each, f"{name}_{at}") for at, each in enumerate(inner))
    if origin in (list, frozenset, set):
        return origin([sample(inner[0], name)])
    if origin in (dict, Mapping) or wanted is dict:
        return {sample(inner[0], f"{name}_key"): sample(inner[1], name)}
    if isinstance(wanted, type):
        return _of_class(wanted, name)
    raise TypeError(f"{name}: no sample of {wanted!r}: add one to tests/golden/samples.py")


def _of_class(wanted: type, name: str) -> Any:
    if issubclass(wanted, Enum):
        return next(iter(wanted))
    plain: dict[type, Any] = {
        str: name,
        bool: True,
        int: len(name),
        float: len(name) + 0.25,
        datetime: NOW,
        timedelta: timedelta(seconds=len(name)),
        Path: Path("/golden") / name,
    }
    if wanted in plain:
        return plain[wanted]
    fields = _fields(wanted)
    return wanted(**{field: sample(kind, field) for field, kind in fields.items()})


def _fields(wanted: type) -> dict[str, Any]:
    hints = typing.get_type_hints(wanted, include_extras=True)
    if dataclasses.is_dataclass(wanted):
        return {each.name: hints[each.name] for each in dataclasses.fields(wanted) if each.init}
    for names in ("_fields", "model_fields"):
        if hasattr(wanted, names):
            return {name: hints[name] for name in getattr(wanted, names)}
    raise TypeError(f"no sample of {wanted!r}: add one to tests/golden/samples.py")


def words_of(wanted: Any, found: dict[type[Enum], None] | None = None) -> dict[type[Enum], None]:
    """Every Enum that a value of the type may hold a word of."""
    found = {} if found is None else found
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        found[wanted] = None
    elif isinstance(wanted, type) and (
        dataclasses.is_dataclass(wanted) or hasattr(wanted, "_fields")
    ):
        for kind in _fields(wanted).values():
            words_of(kind, found)
    else:
        for each in typing.get_args(wanted):
            words_of(each, found)
    return found
