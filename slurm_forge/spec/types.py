"""The value types of a job file: text that is safe where it ends up, durations, sizes, GPUs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from slurm_forge.documents import wrong_key
from slurm_forge.units import (
    MIB,
    format_duration,
    format_memory,
    format_slurm_duration,
    parse_duration,
    parse_memory,
)

_QUOTING = re.compile(r"[\s\"'\\]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GPUS = re.compile(r"(?:(?P<kind>[A-Za-z][A-Za-z0-9_.-]{0,63}):)?(?P<count>[0-9]{1,6})")
#: A bare number above this is bytes by mistake: as MiB it would be more than 16 TiB.
_LARGEST_BARE_MEMORY = 16 * MIB
_MAX_ARGUMENT_DEPTH = 24


class JobSection(BaseModel):
    """Base of everything users write: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class SwitchableSection(JobSection):
    """A section with ``enabled``; ``key: false`` is refused with what to write instead."""

    key: ClassVar[str]
    #: What the error calls it.
    called: ClassVar[str] = "it"

    @model_validator(mode="before")
    @classmethod
    def _switched_off_by_its_key(cls, data: object) -> object:
        if data is False:
            raise ValueError(f'to switch {cls.called} off, write "{cls.key}: {{enabled: false}}"')
        return data


@dataclass(frozen=True, slots=True)
class GpuCount:
    """A number of GPUs, of one kind where the user says which (``a100:4``)."""

    count: int
    kind: str | None = None

    def __str__(self) -> str:
        return str(self.count) if self.kind is None else f"{self.kind}:{self.count}"


def check_printable(text: str) -> str:
    """Text without line breaks, control and invisible characters."""
    for position, character in enumerate(text):
        if not character.isprintable():
            raise ValueError(
                f"character {position + 1} is {_named(character)}; "
                "line breaks, control and invisible characters are not allowed here"
            )
    return text


def check_directive(text: str) -> str:
    """Text that can stand behind ``#SBATCH --option=`` and change nothing but that option."""
    check_printable(text)
    if not text:
        raise ValueError("is empty; leave the key out")
    if text.startswith("-"):
        raise ValueError('starts with "-", which Slurm would read as another option')
    match = _QUOTING.search(text)
    if match is not None:
        raise ValueError(f"holds {_named(match[0])}; spaces, quotes and \\ are not allowed here")
    return text


def text_of_number(value: Any) -> Any:
    """Text of a whole number, where text is meant and only digits were written."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, (bool, float)):
        shown = str(value).lower() if isinstance(value, bool) else value
        raise ValueError(f'expected text, got {shown}; quote it: "{shown}"')
    return value


def _named(character: str) -> str:
    names = {"\n": "a line break", "\r": "a line break", "\t": "a tab", " ": "a space"}
    if character in names:
        return names[character]
    return character if character.isprintable() else f"U+{ord(character):04X}"


def _parse_time_limit(value: object) -> timedelta:
    if isinstance(value, str) and value.strip().lower() in ("unlimited", "infinite", "-1"):
        raise ValueError("leave it out for the partition's own limit; a run continues beyond it")
    return _positive(parse_duration(value))


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("must be longer than 0")
    return value


def _parse_memory(value: object) -> int:
    if isinstance(value, int) and value > _LARGEST_BARE_MEMORY:
        raise ValueError(
            f"{value} without a unit is MiB, as in Slurm; "
            f'write "{format_memory(value)}" if it is bytes'
        )
    return parse_memory(value)


def _parse_gpus(value: object) -> GpuCount:
    if isinstance(value, GpuCount):
        return value
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        match = _GPUS.fullmatch(str(value))
        if match is not None:
            return GpuCount(int(match["count"]), match["kind"])
    raise ValueError('expected a number of GPUs, or kind and number like "a100:4"')


def _write_gpus(value: GpuCount) -> int | str:
    return value.count if value.kind is None else str(value)


def _environment(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    texts = {}
    for name, raw in value.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise wrong_key(str(name), "not a name for an environment variable")
        try:
            text = text_of_number(raw)
            if not isinstance(text, str):
                raise ValueError("expected text")
            texts[name] = check_printable(text)
        except ValueError as error:
            raise wrong_key(name, str(error)) from None
    return texts


def _check_arguments(value: dict[str, Any]) -> dict[str, Any]:
    _check_json(value, ())
    return value


def _check_json(value: Any, path: tuple[str | int, ...]) -> None:
    # What a document can't hold must not come in through Python either: run.yaml is read back.
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong_key(path, "infinity and not-a-number are not allowed here")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise wrong_key(path, "half of a surrogate pair is not text")
    if len(path) > _MAX_ARGUMENT_DEPTH:
        raise wrong_key(path[:2], f"nested deeper than {_MAX_ARGUMENT_DEPTH} levels")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_json(key, path)
            _check_json(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_json(inner, (*path, index))


def _parse_interval(value: object) -> object:
    if value == AUTO:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        shown = f'"{value}"' if isinstance(value, str) else str(value)
        raise ValueError(f"expected a number of minutes or auto, got {shown}")
    if not 0 < value < math.inf:
        raise ValueError(f"expected more than 0, got {value}")
    return float(value)


def _text_schema(*examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": list(examples)})


Count = Annotated[int, Field(strict=True, ge=1)]
Steps = Annotated[int, Field(strict=True, ge=0)]
Factor = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]

#: The word for what is chosen from measurements.
AUTO: Literal["auto"] = "auto"
Minutes = Annotated[float | Literal["auto"], BeforeValidator(_parse_interval)]

Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    _text_schema("60s", "10m", "1h30m", "48:00:00"),
]
PositiveDuration = Annotated[Duration, AfterValidator(_positive)]
TimeLimit = Annotated[
    timedelta,
    BeforeValidator(_parse_time_limit),
    PlainSerializer(format_slurm_duration, return_type=str, when_used="json"),
    _text_schema("00:30:00", "2-12:00:00", "8h"),
]
# Written as text in Python too: a bare number would be read back as MiB.
Memory = Annotated[
    int,
    BeforeValidator(_parse_memory),
    PlainSerializer(format_memory, return_type=str),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["1500M", "4G"]}),
]
Gpus = Annotated[
    GpuCount,
    BeforeValidator(_parse_gpus),
    PlainSerializer(_write_gpus),
    WithJsonSchema({"type": ["string", "integer"], "examples": [8, "a100:4"]}),
]
DirectiveText = Annotated[str, Field(strict=True), AfterValidator(check_directive)]
ShellText = Annotated[
    str, Field(strict=True), BeforeValidator(text_of_number), AfterValidator(check_printable)
]
Environment = Annotated[dict[str, str], BeforeValidator(_environment)]
Arguments = Annotated[dict[str, JsonValue], AfterValidator(_check_arguments)]
