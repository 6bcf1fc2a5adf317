"""Documents laid over each other, and single values laid over a document.  Pure.

Keys and values are merged key by key; anything else (a list, a number, text, null) replaces what
lies below.  Every key keeps the place where it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeGuard

from slurm_forge.documents.keypath import KeyPath, dotted
from slurm_forge.documents.reading import DEFAULT, Document


def merged(*layers: Document) -> Document:
    """One document of several, of which the later ones win; it is called as the last one is.

    It does not matter which neighbours are merged first.
    """
    return reduce(laid_over, layers)


def laid_over(low: Document, high: Document) -> Document:
    """``high`` over ``low``."""
    lines = dict(low.lines)
    sources = {path: low.sources.get(path, low.path) for path in (*low.lines, *low.sources)}
    replaced = set(low.whole)

    def over(below: Mapping[str, Any], above: Mapping[str, Any], at: KeyPath) -> dict[str, Any]:
        values = dict(below)
        for key, value in above.items():
            here = (*at, key)
            there = below.get(key)
            if _is_mapping(value) and _is_mapping(there) and here not in high.whole:
                if high.written_at(here) is not None:
                    take(here)
                values[key] = over(there, value, here)
                continue
            if key in below:
                forget(here, there)
            if _is_mapping(value) and key in below and not _is_mapping(there):
                replaced.add(here)
            for path in paths_in(value, here):
                take(path)
            values[key] = value
        return values

    def take(path: KeyPath) -> None:
        lines.pop(path, None)
        if path in high.lines:
            lines[path] = high.lines[path]
        sources[path] = high.sources.get(path, high.path)
        if path in high.whole:
            replaced.add(path)

    def forget(path: KeyPath, value: Any) -> None:
        for each in paths_in(value, path):
            lines.pop(each, None)
            sources.pop(each, None)
            replaced.discard(each)

    data = over(low.data, high.data, ())
    if high.written_at(()) is not None:
        take(())
    return Document(data, high.path, lines, sources, frozenset(replaced))


def without(document: Document, *keys: str) -> Document:
    """The document without these keys at the top."""
    removed = {
        path
        for key in keys
        if key in document.data
        for path in paths_in(document.data[key], (key,))
    }
    return replace(
        document,
        data={key: value for key, value in document.data.items() if key not in keys},
        lines={path: line for path, line in document.lines.items() if path not in removed},
        sources={path: name for path, name in document.sources.items() if path not in removed},
        whole=document.whole - removed,
    )


def with_value(
    document: Document, path: KeyPath, value: Any, source: str, defaults: Mapping[str, Any]
) -> Document:
    """``value`` laid over the document at ``path``; ``ValueError`` where there is no such place.

    A list of one item needs no index.  Where the path leads through a list that nobody has
    written, it is that of ``defaults``, the values of all that is left out.
    """
    here: list[str | int] = []
    value_there: Any = document.data
    default: Any = defaults
    for position, part in enumerate(path):
        items = default if value_there is None else value_there
        if isinstance(items, list):
            index = _index(items, tuple(here), path[position:])
            if value_there is None:  # written out, to be changed in one place
                document = _set(document, tuple(here), items, source, inside=DEFAULT)
            here.append(index)
            value_there, default = items[index], None
            if isinstance(part, int):
                continue
        if isinstance(part, int):
            raise ValueError(f"{dotted(tuple(here))} is not a list")
        if not _is_mapping(value_there) and value_there is not None:
            raise ValueError(f"{dotted(tuple(here))} has no keys; set it as a whole")
        here.append(part)
        value_there = None if value_there is None else value_there.get(part)
        default = default.get(part) if _is_mapping(default) else None
    return _set(document, tuple(here), value, source)


def paths_in(value: Any, at: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of a value and of everything in it."""
    yield at
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from paths_in(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths_in(inner, (*at, index))


def _set(
    document: Document, path: KeyPath, value: Any, source: str, *, inside: str | None = None
) -> Document:
    overlay = value
    for part in reversed(path):
        overlay = {part: overlay}
    written = dict.fromkeys(paths_in(value, path), inside or source)
    above = Document(overlay, source, sources={**written, path: source})
    # For as long as it takes, the lists on the way are keys and values: so items can be merged.
    opened = replace(document, data=_opened(document.data, path))
    done = laid_over(opened, above)
    return replace(done, path=document.path, data=_closed(done.data, path))


def _opened(value: Any, path: KeyPath) -> Any:
    if not path:
        return value
    if isinstance(value, list):
        value = dict(enumerate(value))
    if _is_mapping(value) and path[0] in value:
        return {**value, path[0]: _opened(value[path[0]], path[1:])}
    return value


def _closed(value: Any, path: KeyPath) -> Any:
    if not path:
        return value
    if _is_mapping(value) and path[0] in value:
        value = {**value, path[0]: _closed(value[path[0]], path[1:])}
    return list(value.values()) if isinstance(path[0], int) else value


def _index(items: Sequence[Any], at: KeyPath, rest: KeyPath) -> int:
    """Which item ``rest``, the part of a path from a list on, means."""
    part, count = rest[0], len(items)
    named = dotted(at)
    if not items:
        raise ValueError(f"{named} is an empty list; set all of it")
    if isinstance(part, int):
        if part < count:
            return part
        has = "one item" if count == 1 else f"{count} items"
        raise ValueError(f"{named} has {has}, counted from 0; to add one, set all of it")
    if count == 1:
        return 0
    first, last = dotted((*at, 0, *rest)), dotted((*at, count - 1, *rest))
    between = "or" if count == 2 else "to"
    raise ValueError(f"{named} has {count} items; say which: {first} {between} {last}")


def _is_mapping(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)
