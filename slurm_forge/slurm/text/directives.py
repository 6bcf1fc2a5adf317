"""``#SBATCH`` lines, written and read by sbatch's own rules, which are not a shell's.

Within any kind of quotes a backslash still escapes what follows, and an unquoted ``#`` ends the
line (``get_argument`` in src/sbatch/opt.c of 20.11 to 26.05; what of a backslash before a space
differs between them is never written here).
"""

from __future__ import annotations

import re

__all__ = ["as_directive", "read_directives"]

#: Nothing of it is a quote, an escape, a comment or the end of a word to sbatch.
_PLAIN = re.compile(r"[^\s\"'\\#]+")
_MARKS = ("#SBATCH", "#SLURM")
_SPACE = " \t\n\v\f\r"


def as_directive(option: str) -> str:
    """An option (``--name=value``) as one word of an ``#SBATCH`` line.

    It must be one line of text; quotes are added where there is something to quote.
    """
    if _PLAIN.fullmatch(option):
        return option
    name, sign, value = option.partition("=")
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}{sign}'{escaped}'"


def read_directives(script: str) -> tuple[str, ...]:
    """Every option that sbatch reads from a script, in order.

    ``ValueError`` for a line that sbatch refuses to read.  What belongs to the further parts of a
    heterogeneous job is read like the rest.
    """
    found: list[str] = []
    for line in script.split("\n"):
        mark = next((mark for mark in _MARKS if line.startswith(mark)), None)
        if mark is not None:
            found += _words(line[len(mark) :])
        elif not line.lstrip(_SPACE).startswith("#") and line.strip(_SPACE):
            break  # the first command
    return tuple(found)


def _words(line: str) -> list[str]:
    words: list[str] = []
    at = 0
    while True:
        while at < len(line) and line[at] in _SPACE:
            at += 1
        if line[at : at + 1] == ":":
            raise ValueError(f"unexpected : in {line!r}")
        word, at = _word(line, at)
        if word is None:
            return words
        words.append(word)


def _word(line: str, at: int) -> tuple[str | None, int]:
    """The next word and where it ends; no word where a comment or the end of the line is next."""
    word: str | None = None
    quote = ""
    while at < len(line) and (quote or line[at] not in _SPACE):
        if line[at] == "\\":
            at += 1
            if at == len(line):
                break
        elif quote:
            if line[at] == quote:
                quote, at = "", at + 1
                continue
        elif line[at] in "\"'":
            quote, at = line[at], at + 1
            continue
        elif line[at] == "#":
            break
        word = (word or "") + line[at]
        at += 1
    if quote:
        raise ValueError(f"unmatched {quote} in {line!r}")
    return word, at
