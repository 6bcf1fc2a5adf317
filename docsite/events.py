"""The reference of the journal: every kind of event and what it holds."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_args

from docsite.tables import code, default_words, paragraph, table
from slurm_forge.journal import events
from slurm_forge.journal.file import Record
from slurm_forge.vocabulary import cause, decision, plan

__all__ = ["journal"]


def journal() -> list[str]:
    """The envelope, a section per kind, and the values that events are made of."""
    lines = ["## The line of an event", "", *_section(Record)]
    lines += ["", "## Kinds"]
    for kind in get_args(get_args(events.Event)[0]):
        lines += ["", f"### {_kind(kind)}", "", *_section(kind)]
    lines += ["", "## Values in events"]
    for found in _values():
        lines += ["", f"### {found.__name__}", "", *_section(found)]
    return lines


def _kind(event: Any) -> str:
    (found,) = (each.default for each in dataclasses.fields(event) if each.name == "kind")
    return str(found)


def _section(kind: Any) -> Iterator[str]:
    said, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:\n")
    yield paragraph(said)
    if issubclass(kind, Enum):
        yield ""
        yield ", ".join(code(each.value) for each in kind)
        return
    meant = _descriptions(attributes)
    rows = [
        (code(each.name), code(_type(each)), _default(each), *([meant[each.name]] if meant else ()))
        for each in dataclasses.fields(kind)
        if each.name != "kind"
    ]
    if rows:
        yield ""
        yield from table(("field", "type", "default", *(["description"] if meant else ())), rows)


def _descriptions(attributes: str) -> dict[str, str]:
    """Of each field, from the part ``Attributes:`` of a docstring; empty where there is none."""
    entries = re.split(r"^ {4}(\w+): ", attributes, flags=re.MULTILINE)[1:]
    return dict(zip(entries[::2], map(paragraph, entries[1::2]), strict=True))


def _type(field: dataclasses.Field[Any]) -> str:
    text = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
    text = text.replace("Event | UnknownEvent | EarlierState", "Event")  # what is written
    text = re.sub(r"tuple\[(.*), \.\.\.\]", r"list of \1", text.replace("ev.", ""))
    return text.replace(" | None", "").replace(" | ", " or ")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
        return default_words(getattr(value, "value", value) if value != () else None)
    return "-" if field.default_factory is not dataclasses.MISSING else "required"


def _values() -> list[type]:
    """Dataclasses and enums of the vocabulary that events hold, in the order of their names."""
    found = {
        each
        for module in (cause, decision, plan)
        for each in vars(module).values()
        if inspect.isclass(each)
        and each.__module__ == module.__name__
        and (dataclasses.is_dataclass(each) or issubclass(each, Enum))
    }
    return sorted(found, key=lambda each: each.__name__)
