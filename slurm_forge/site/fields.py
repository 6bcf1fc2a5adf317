"""What single values of a site file look like: durations, options, names, dates."""

from __future__ import annotations

import re
from datetime import date, timedelta
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import CoreSchema

from slurm_forge.units import (
    format_bandwidth,
    format_duration,
    format_memory,
    parse_bandwidth,
    parse_duration,
    parse_memory,
)


def _duration(value: object) -> timedelta | None:
    return None if value is None else parse_duration(value)


def _bandwidth(value: object) -> float | None:
    if value is None or (isinstance(value, float) and value > 0):
        return value
    return float(parse_bandwidth(value))


def check_line(text: str) -> str:
    """One line of printable text; ``ValueError`` otherwise."""
    if not text.isprintable():
        raise ValueError("must be one line of printable text")
    return text


def check_option(text: str) -> str:
    """The text of an option; ``ValueError`` otherwise."""
    if not re.fullmatch(r"--?[A-Za-z][A-Za-z0-9-]*(?:[= ].*)?", check_line(text)):
        raise ValueError('options begin with a dash, like "--gres" or "--network=single_node_vni"')
    return text


def _variables(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name[:40]!r} is not a valid environment variable name")
        check_line(value)
    return values


def _folder(text: str) -> str:
    if not check_line(text).startswith("/"):
        raise ValueError("the path of a folder, from / on")
    return text


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", text):
        raise ValueError("letters, digits, '_', '-' and '.' only")
    return text


def _module(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+/:-]{0,127}", text):
        raise ValueError('the name of a module, like "cuda/12.4"')
    return text


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9.*?-]{1,253}", text) or not re.search("[A-Za-z0-9]", text):
        raise ValueError('a host name, with * and ? for what varies: "login*.hill.example"')
    return text


def _feature(text: str) -> str:
    # It becomes part of an #SBATCH line, in which a space begins another option.
    if not re.fullmatch(r"[^\s\"'\\-][^\s\"'\\]{0,255}", check_line(text)):
        raise ValueError('features as --constraint takes them, without spaces: "a100&nvlink"')
    return text


def _day(text: str) -> str:
    # "2026-8" would sort and compare wrongly.
    match = re.fullmatch(r"([0-9]{4})-([0-9]{2})(?:-([0-9]{2}))?", text)
    try:
        date(*(int(part or 1) for part in match.groups())) if match else None
    except ValueError:
        match = None
    if match is None:
        raise ValueError('a day like "2026-08-20", or a month like "2026-08"')
    return text


def _memory(value: object) -> int | None:
    return None if value is None else parse_memory(value)


def wholly(text: str) -> re.Pattern[str]:
    """The pattern of a text with ``*`` and ``?`` for what varies; capitals do not count."""
    parts = {"*": ".*", "?": "."}
    return re.compile("".join(parts.get(c) or re.escape(c) for c in text), re.IGNORECASE)


#: A duration such as ``"120s"``, ``"90d"`` or ``"2-00:00:00"``; ``null`` where it is unknown.
Duration = Annotated[
    timedelta | None,
    BeforeValidator(_duration),
    PlainSerializer(lambda value: None if value is None else format_duration(value)),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
#: Bytes per second, as ``"180 GB/s"``; ``null`` where it is unknown.
Bandwidth = Annotated[
    float | None,
    BeforeValidator(_bandwidth),
    PlainSerializer(
        lambda value: None if value is None else format_bandwidth(value), when_used="json"
    ),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
#: Bytes, as ``"60G"``; ``null`` where it is unknown.
Memory = Annotated[
    int | None,
    BeforeValidator(_memory),
    PlainSerializer(lambda value: None if value is None else format_memory(value)),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
Line = Annotated[str, AfterValidator(check_line)]
Option = Annotated[str, AfterValidator(check_option)]
FolderPath = Annotated[str, AfterValidator(_folder)]
Variables = Annotated[dict[str, str], AfterValidator(_variables)]
Name = Annotated[str, AfterValidator(_name)]
ModuleName = Annotated[str, AfterValidator(_module)]
HostPattern = Annotated[str, AfterValidator(_host)]
Day = Annotated[str, AfterValidator(_day)]
Feature = Annotated[str, AfterValidator(_feature)]


class Facts(BaseModel):
    """A group of facts: frozen, and a key that is not known is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OrText(Facts):
    """Facts of which the first alone may be written as plain text."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Say so in the JSON Schema, for editors."""
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}
