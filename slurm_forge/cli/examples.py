"""The examples in the help of a verb, as values: what the tests parse and the reference prints."""

from __future__ import annotations

import inspect
import shlex

_MARKS = ("Examples:", "Example:")
_PROGRAM = "slurm-forge"
#: What a shell does behind our command is not ours to read.
_ENDS = ("|", "&&", ";", ">", ">>", "#")


def examples_of(text: str | None) -> tuple[str, ...]:
    """The command lines below ``Examples:`` (or beside ``Example:``) in the docstring of a verb."""
    lines = iter(inspect.cleandoc(text or "").splitlines())
    examples: list[str] = []
    for line in lines:
        mark = next((mark for mark in _MARKS if line.startswith(mark)), None)
        if mark is None:
            continue
        beside = line.removeprefix(mark).strip()
        examples += [beside] if beside else []
        for below in lines:
            if not below.startswith(" "):
                break
            examples.append(below.strip())
    return tuple(examples)


def without_examples(text: str | None) -> str:
    """The rest of the docstring."""
    rest = []
    inside = False
    for line in inspect.cleandoc(text or "").splitlines():
        inside = line.startswith(_MARKS) or (inside and line.startswith(" "))
        if not inside:
            rest.append(line)
    return "\n".join(rest).replace("\b\n", "").rstrip("\b \n")


def words_for_us(line: str) -> list[str] | None:
    """The words that ``slurm-forge`` would get of a line typed in a shell; None where it has none.

    Variables in front and whatever follows a pipe are dropped.  ``ValueError`` for quotes that
    are not closed.
    """
    words = shlex.split(line, comments=True)
    if _PROGRAM not in words:
        return None
    arguments = words[words.index(_PROGRAM) + 1 :]
    if "--" in arguments:  # the program's words are the program's
        return arguments
    end = next((index for index, word in enumerate(arguments) if word in _ENDS), len(arguments))
    return arguments[:end]
