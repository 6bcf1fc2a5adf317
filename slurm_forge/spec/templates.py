"""Words with fields in braces, as a user writes them for the command line of a program.

Split once, as a shell would, and never given to one: whatever is filled in stays inside its word.
"""

from __future__ import annotations

import shlex
import string
from collections.abc import Mapping
from enum import Enum


class Placeholder(str, Enum):
    """What can be filled in."""

    #: The newest match of ``checkpoint_glob``, as an absolute path.
    LATEST = "latest"
    ATTEMPT = "attempt"
    LAUNCH = "launch"
    #: How often the program has been started before.
    RESTARTS = "restarts"
    RUN_DIR = "run_dir"


_KNOWN = ", ".join("{" + each.value + "}" for each in Placeholder)


def check_template(text: str) -> str:
    """``ValueError`` for words that can't be split, and for fields that there are not."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"can't be split into words: {str(error).lower()}") from None
    if not words:
        raise ValueError("is empty; leave it out")
    for word in words:
        _fields(word)
    return text


def fields_of(text: str) -> frozenset[Placeholder]:
    """The fields of a template that was checked."""
    return frozenset(field for word in shlex.split(text) for field in _fields(word))


def fill(text: str, values: Mapping[Placeholder, str]) -> tuple[str, ...]:
    """The words, with every field filled in."""
    texts = {field.value: value for field, value in values.items()}
    return tuple(_filled(word, texts) for word in shlex.split(text))


def _parts(word: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(string.Formatter().parse(word))
    except ValueError as error:
        raise ValueError(f"{word!r}: {str(error).lower()}; write a literal brace twice") from None


def _fields(word: str) -> list[Placeholder]:
    fields = []
    for _, name, spec, conversion in _parts(word):
        if name is None:
            continue
        if spec or conversion or name not in {each.value for each in Placeholder}:
            shown = "{" + name + (f"!{conversion}" if conversion else "")
            shown += (f":{spec}" if spec else "") + "}"
            raise ValueError(f"unknown field {shown} (known: {_KNOWN})")
        fields.append(Placeholder(name))
    return fields


def _filled(word: str, texts: Mapping[str, str]) -> str:
    return "".join(
        literal + ("" if name is None else texts[name]) for literal, name, _, _ in _parts(word)
    )
