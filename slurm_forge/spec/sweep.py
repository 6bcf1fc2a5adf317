"""The key ``sweep:`` of a job file: which keys take which values, and how many runs at once."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from slurm_forge.documents import KeyPath, dotted, leading, nearest, wrong_key
from slurm_forge.spec.launchers import MOST_TASKS

LIMIT = "limit"
#: What other tools call the limit.
_LIMIT_ELSEWHERE = (
    "array_parallelism", "concurrency", "max_parallel", "max_running", "parallel", "throttle",
    "at_once", "limits",
)  # fmt: skip
#: What is another in every run already, or no key of a run.
_NOT_SWEPT = {
    "name": "each run is named after the sweep and its number",
    "sweep": "a sweep can't hold a sweep",
    "chain": "a sweep is an array of runs, so none of them can be an array of attempts",
}
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")


@dataclass(frozen=True, slots=True)
class SweptKey:
    """A key of the job and the values that it takes."""

    path: KeyPath
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """Every combination of the values of ``keys``; at most ``limit`` runs at once, None is all."""

    keys: tuple[SweptKey, ...]
    limit: int | None = None

    def __len__(self) -> int:
        return math.prod(len(key.values) for key in self.keys)

    def points(self) -> Iterator[tuple[tuple[KeyPath, Any], ...]]:
        """The settings of each run; the last key changes fastest."""
        paths = [key.path for key in self.keys]
        for values in itertools.product(*(key.values for key in self.keys)):
            yield tuple(zip(paths, values, strict=True))

    def to_mapping(self) -> dict[str, Any]:
        """As it is written in a job file."""
        limit = {} if self.limit is None else {LIMIT: self.limit}
        return {**{dotted(key.path): list(key.values) for key in self.keys}, **limit}


def _parsed(value: object) -> object:
    if value is None or isinstance(value, SweepSpec):
        return value
    if not isinstance(value, Mapping):
        raise ValueError('expected keys and their values: {args.lr: [1e-4, 3e-4], seed: "0-4"}')
    keys: list[SweptKey] = []
    for name, values in value.items():
        if name == LIMIT:
            continue
        keys.append(SweptKey(_path(name), _values(name, values)))
    if not keys:
        raise ValueError('names no key; write for example {args.lr: [1e-4, 3e-4], seed: "0-4"}')
    _refuse_overlap(keys)
    spec = SweepSpec(tuple(keys), _limit(value.get(LIMIT)))
    if len(spec) > MOST_TASKS:
        raise ValueError(f"{len(spec)} combinations; a sweep has at most {MOST_TASKS} runs")
    return spec


def _path(name: str) -> KeyPath:
    path, rest = leading(name)
    if not path or rest:
        raise wrong_key(
            (name,), f"{name!r} is not a key; write the keys of a job file, as args.lr or seed"
        )
    first = str(path[0])
    if first in _LIMIT_ELSEWHERE or (len(path) == 1 and nearest(first, [LIMIT]) is not None):
        raise wrong_key((name,), f'unknown key (did you mean "{LIMIT}"?)')
    if first in _NOT_SWEPT:
        raise wrong_key((name,), f"can't be swept: {_NOT_SWEPT[first]}")
    return path


def _values(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str):
        return _numbers(name, values)
    if not isinstance(values, (list, tuple)) or not values:
        raise wrong_key((name,), 'expected a list of values, or numbers such as "0-4"')
    texts = [json.dumps(each, sort_keys=True) for each in values]
    for index, text in enumerate(texts):
        if text in texts[:index]:
            raise wrong_key((name, index), f"{text} is there twice: both runs would be the same")
    return tuple(values)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """``0-4``, ``0-8:2``, ``1,3,5-7``: as Slurm writes the tasks of an array."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last, step = (0, -1, 1) if match is None else _bounds(match)
        if last < first or step == 0:
            raise wrong_key(
                (name,),
                f'"{text}" is not a range of numbers such as "0-4" or "0-8:2"; write other values '
                "as a list",
            )
        numbers += itertools.islice(range(first, last + 1, step), MOST_TASKS + 1)
    if len(set(numbers)) < len(numbers):
        raise wrong_key((name,), f'"{text}" holds a number twice: both runs would be the same')
    return tuple(numbers)


def _bounds(match: re.Match[str]) -> tuple[int, int, int]:
    return int(match[1]), int(match[2] or match[1]), int(match[3] or 1)


def _limit(value: object) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise wrong_key((LIMIT,), "expected how many runs may run at once, a whole number from 1")
    return value


def _refuse_overlap(keys: list[SweptKey]) -> None:
    for first, second in itertools.combinations(keys, 2):
        shorter = min(len(first.path), len(second.path))
        if first.path[:shorter] == second.path[:shorter]:
            raise wrong_key(
                (dotted(second.path),), f"is set by {dotted(first.path)} as well; keep one of them"
            )


#: The value of ``sweep:`` in a job file.
Sweep = Annotated[
    SweepSpec,
    BeforeValidator(_parsed),
    PlainSerializer(SweepSpec.to_mapping, return_type=dict[str, Any]),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {LIMIT: {"type": "integer", "minimum": 1}},
            "additionalProperties": {"type": ["array", "string"]},
            "examples": [{"args.lr": [1e-4, 3e-4], "seed": "0-4", LIMIT: 4}],
        }
    ),
]
