"""Every value of a job, and where it comes from.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_forge.documents import DEFAULT, Document, KeyPath, SourcePlace, dotted, flow
from slurm_forge.spec.layers import Layered
from slurm_forge.spec.loading import to_mapping


@dataclass(frozen=True, slots=True)
class JobValue:
    """One value in plain form, as a job file may hold it; ``place`` has no file for a default."""

    path: KeyPath
    value: Any
    place: SourcePlace

    @property
    def key(self) -> str:
        """As in messages and for ``--set``: ``recovery.cuda_oom[0].times``."""
        return dotted(self.path)

    @property
    def text(self) -> str:
        """The value as YAML in one line, which ``--set`` takes."""
        return flow(self.value)


def job_values(layered: Layered) -> tuple[JobValue, ...]:
    """The whole job, what nobody has written too, in the order of the model."""
    return tuple(
        JobValue(path, value, _origin(layered.document, path))
        for path, value in _leaves(to_mapping(layered.job), (), layered.document)
    )


def _leaves(value: Any, path: KeyPath, document: Document) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key), document)
    elif isinstance(value, list) and _is_told_by_item(value, path, document):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index), document)
    else:
        yield path, value


def _is_told_by_item(value: list[Any], path: KeyPath, document: Document) -> bool:
    """Whether items have keys of their own, or come from several places."""
    if any(isinstance(each, Mapping) for each in value):
        return True
    whole = document.written_at(path)
    items = [document.written_at((*path, index)) for index in range(len(value))]
    return any(item is not None and whole and item.source != whole.source for item in items)


def _origin(document: Document, path: KeyPath) -> SourcePlace:
    """Where the value is written: by its own key, or in a short form of what is around it."""
    place = document.written_at(path)
    if place is not None:
        return place
    value: Any = document.data
    for end, part in enumerate(path):
        inner = _inside(value, part)
        if inner is _NOT_THERE:
            # What is around it says it in another form, or nobody does.
            short = not isinstance(value, (Mapping, list)) and value is not None
            return document.place_of(path[:end]) if short else SourcePlace(DEFAULT)
        value = inner
    return SourcePlace(DEFAULT)


_NOT_THERE = object()


def _inside(value: Any, part: str | int) -> Any:
    if isinstance(part, int):
        there = isinstance(value, list) and part < len(value)
    else:
        there = isinstance(value, Mapping) and part in value
    return value[part] if there else _NOT_THERE
