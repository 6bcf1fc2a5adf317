"""Strict YAML into plain values that know their lines."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from slurm_forge.documents.indentation import misplaced
from slurm_forge.documents.keypath import KeyPath, dotted
from slurm_forge.documents.writing import is_plain_text, plain_value, shorten
from slurm_forge.errors import ConfigError, FileTooLargeError
from slurm_forge.files import read_named, read_trusted

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_PREFIX = "tag:yaml.org,2002:"
_CORE_TAGS: dict[str, tuple[type, ...]] = {
    "!": (str,),
    _PREFIX + "str": (str,),
    _PREFIX + "int": (int,),
    _PREFIX + "float": (int, float),
    _PREFIX + "bool": (bool,),
    _PREFIX + "null": (types.NoneType,),
}


#: The source of what nobody has written.
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Where a value is written: a file and its line (from 1), or an option of the command line."""

    source: str | None
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.source or ''}" + ("" if self.line is None else f":{self.line}")


@dataclass(frozen=True, slots=True)
class Document:
    """Plain values of one file, and the line (from 1) of every key and list item.

    Of several files that were laid over each other (``documents.layers``) ``sources`` says which
    one a key is from, and ``whole`` which mappings replace what lies below, instead of adding to
    it.
    """

    data: dict[str, Any]
    path: str | None = None
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    sources: Mapping[KeyPath, str | None] = field(default_factory=dict)
    whole: frozenset[KeyPath] = frozenset()

    def place_of(self, path: KeyPath) -> SourcePlace:
        """Where the key or item is written, or the nearest one around it that somebody wrote."""
        for end in range(len(path), -1, -1):
            place = self.written_at(path[:end])
            if place is not None and place.source != DEFAULT:
                return place
        return SourcePlace(self.path)

    def written_at(self, path: KeyPath) -> SourcePlace | None:
        """Where this very key or item is written; None where it is not."""
        if path in self.lines or path in self.sources:
            return SourcePlace(self.sources.get(path, self.path), self.lines.get(path))
        return None

    def line_of(self, path: KeyPath) -> int | None:
        """Line of the key or item, or of the nearest one around it; ``None`` without a text."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None


def read(
    path: str | os.PathLike[str],
    *,
    trusted: bool = False,
    owner: int | None = None,
    of_group: bool = False,
    shown: str | None = None,
    may_be_empty: bool = False,
) -> Document:
    """Document in a file of at most 1 MiB; ``ConfigError`` names file and line of a mistake.

    ``trusted`` is for files that were found rather than named by the user: only we or root may be
    able to write them, else ``UnsafeFileError``; ``owner`` and ``of_group`` as for
    ``refuse_foreign``.  ``shown`` is what people call the file, and
    ``may_be_empty`` one in which everything may be left out.
    """
    name = os.fspath(path) if shown is None else shown
    try:
        data = (
            read_trusted(path, MAX_BYTES, owner=owner, of_group=of_group)
            if trusted
            else read_named(path, MAX_BYTES)
        )
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError("not UTF-8 text", path=name, line=line) from None
    except FileTooLargeError:
        if trusted:
            raise
        raise ConfigError(
            f"larger than {MAX_BYTES} bytes",
            path=name,
            next_step="Nothing that is written by hand grows that large: is it the right file?",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"can't be read: {os.strerror(error.errno or 0)}",
            path=name,
            next_step="Check the path; a relative one starts at the current folder.",
        ) from error
    return load(text, name, may_be_empty=may_be_empty)


def load(
    text: str, path: str | os.PathLike[str] | None = None, *, may_be_empty: bool = False
) -> Document:
    """Document in a text; ``path`` is only for messages.

    The top level must be keys and values, or nothing at all where the text ``may_be_empty``.
    """
    name = None if path is None else os.fspath(path)
    if len(text) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES} bytes", path=name)
    reader = _EventReader(name)
    try:
        data = reader.read(text, may_be_empty=may_be_empty)
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(error, name, text) from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ConfigError(
            f"not YAML: character {error.character:#x} is not allowed", path=name, line=line
        ) from None
    return Document(data, name, reader.lines)


def load_value(text: str, at: KeyPath) -> Any:
    """The one value in a line of text, for the key ``at``; ``ConfigError`` has no place.

    A word, a number, something in quotes, ``[a, list]`` or ``{of: keys}``: read as in a file.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{dotted(at)}: larger than {MAX_BYTES} bytes")
    if not text.strip():
        raise ConfigError(f'{dotted(at)}: no value; write null for none, or "" for an empty text')
    if not text.isprintable():
        raise ConfigError(f"{dotted(at)}: must be one line of printable text")
    try:
        return _EventReader(None, one_value=True).read_value(text, at)
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "this can't be read"
        if "document start" in problem:
            problem = "more than one value; quote the whole"
        if "mapping values" in problem:
            problem += '; quote a value that holds ": "'
        raise ConfigError(f"{dotted(at)}: not YAML: {problem}") from None
    except ConfigError as error:
        raise ConfigError(error.message) from None


def _not_yaml(error: yaml.MarkedYAMLError, path: str | None, text: str) -> ConfigError:
    mark, begin = error.problem_mark or error.context_mark, error.context_mark
    line = None if mark is None else mark.line + 1
    problem = error.problem or error.context or "this can't be read"
    wrong_indent = None if mark is None else misplaced(problem, text, mark.line, mark.column)
    if wrong_indent is not None:
        return ConfigError(f"not YAML: {wrong_indent}", path=path, line=line)
    if "\\t" in problem:
        problem += "; indent with spaces, not tabs"
    if "mapping values" in problem:
        problem += '; quote a value that holds ": "'
    if begin is not None and mark is not None and begin.line != mark.line:
        problem += f" (it begins on line {begin.line + 1})"
    return ConfigError(f"not YAML: {problem}", path=path, line=line)


class _Remembering(Iterator[Any]):
    """Events, and the last one that was taken."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self.last: Any = None

    def __next__(self) -> Any:
        self.last = next(self._events)
        return self.last


class _EventReader:
    """Turns the events of PyYAML's safe parser into values: anchors are visible only there."""

    def __init__(self, path: str | None, *, one_value: bool = False) -> None:
        self.path = path
        self.one_value = one_value
        self.lines: dict[KeyPath, int] = {(): 1}

    def read(self, text: str, *, may_be_empty: bool) -> dict[str, Any]:
        events: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)
        next(events)
        first = next(events)
        if isinstance(first, yaml.StreamEndEvent):
            if may_be_empty:
                return {}
            raise ConfigError("the file is empty", path=self.path, line=1)
        event = next(events)
        if not isinstance(event, yaml.MappingStartEvent):
            example = "seed: 1" if may_be_empty else "name: my-run"
            self._fail((), event, f'expected keys and values ("{example}")')
        self._check_node((), event, "map")
        data = self._mapping((), events)
        next(events)
        after = next(events)
        if not isinstance(after, yaml.StreamEndEvent):
            self._fail((), after, 'a second document begins here; one file holds one ("---")')
        return data

    def read_value(self, text: str, path: KeyPath) -> Any:
        events = _Remembering(yaml.parse(text, Loader=yaml.SafeLoader))
        next(events)
        begin = next(events)
        if isinstance(begin, yaml.StreamEndEvent):
            self._fail(path, begin, "no value, only a comment; quote it if it is text")
        if begin.explicit:
            self._fail(path, begin, "expected one value, without document markers")
        first = next(events)
        if isinstance(first, yaml.MappingStartEvent) and not first.flow_style:
            self._fail(path, first, "write keys and values in braces here: {key: value}")
        if isinstance(first, yaml.SequenceStartEvent) and not first.flow_style:
            self._fail(path, first, "write a list in brackets here: [a, b]")
        if getattr(first, "style", None) in ("|", ">"):
            self._fail(path, first, f"{first.style} begins a text of several lines; quote it")
        value = self._value(path, first, events)
        rest = text[events.last.end_mark.index :].strip()
        if rest.startswith("#"):
            self._fail(path, first, f'"{shorten(rest)}" would be a comment; quote the whole value')
        if rest:
            self._fail(path, first, "more than one value; quote the whole")
        next(events)
        if not isinstance(next(events), yaml.StreamEndEvent):
            self._fail(path, first, "more than one value")
        return value

    def _value(self, path: KeyPath, event: Any, events: Iterator[Any]) -> Any:
        if isinstance(event, yaml.MappingStartEvent):
            self._check_node(path, event, "map")
            return self._mapping(path, events)
        if isinstance(event, yaml.SequenceStartEvent):
            self._check_node(path, event, "seq")
            return self._list(path, events)
        return self._scalar(path, event)

    def _check_node(self, path: KeyPath, event: Any, kind: str) -> None:
        self._check_anchor(path, event)
        if event.tag not in (None, "!", _PREFIX + kind):
            self._fail(path, event, f"the tag {shorten(event.tag)} is not read; remove it")
        if len(path) >= MAX_DEPTH:
            self._fail(path[:3], event, f"nested deeper than {MAX_DEPTH} levels")

    def _check_anchor(self, path: KeyPath, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._fail(path, event, "anchors and aliases (& and *) are not read; write it out")

    def _mapping(self, path: KeyPath, events: Iterator[Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self._key(path, event)
            here = (*path, key)
            if key in values:
                where = "there" if self.one_value else f"on line {self.lines[here]}"
                self._fail(here, event, f"this key is already {where}")
            self.lines[here] = event.start_mark.line + 1
            values[key] = self._value(here, next(events), events)
        return values

    def _key(self, path: KeyPath, event: Any) -> str:
        self._check_anchor(path, event)
        if not isinstance(event, yaml.ScalarEvent):
            self._fail(path, event, "a key must be text")
        text: str = event.value
        if event.style is None and event.tag is None:
            if text == "<<":
                self._fail(path, event, "merge keys (<<) are not read; write the keys out")
            if not is_plain_text(text):
                shown = shorten(text)
                self._fail(path, event, f'the key {shown} is not text in YAML; quote it: "{shown}"')
            return text
        value = self._scalar((*path, text), event)
        if not isinstance(value, str):
            self._fail((*path, text), event, "a key must be text; remove the tag")
        return value

    def _list(self, path: KeyPath, events: Iterator[Any]) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            here = (*path, len(values))
            self.lines[here] = event.start_mark.line + 1
            values.append(self._value(here, event, events))
        return values

    def _scalar(self, path: KeyPath, event: Any) -> Any:
        self._check_anchor(path, event)
        if any("\ud800" <= character <= "\udfff" for character in event.value):
            self._fail(path, event, "half of a surrogate pair is not text")
        if event.tag is not None and event.tag not in _CORE_TAGS:
            self._fail(path, event, f"the tag {shorten(event.tag)} is not read; remove it")
        if event.tag in ("!", "tag:yaml.org,2002:str") or (event.tag is None and event.style):
            return event.value
        try:
            value = plain_value(event.value)
        except ValueError as error:
            self._fail(path, event, str(error))
        if event.tag is not None and type(value) not in _CORE_TAGS[event.tag]:
            self._fail(path, event, f"{shorten(event.value)} does not fit the tag; remove the tag")
        return value

    def _fail(self, path: KeyPath, event: Any, message: str) -> NoReturn:
        text = f"{dotted(path)}: {message}" if path else message
        raise ConfigError(text, path=self.path, line=event.start_mark.line + 1)
