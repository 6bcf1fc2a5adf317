"""``#SBATCH`` lines, written and read by sbatch's own rules, which are not a shell's.

Within any kind of quotes a backslash still escapes what follows, and an unquoted ``#`` ends the
line (``get_argument`` in src/sbatch/opt.c of 20.11 to 26.05; what of a backslash before a space
differs between them is never written here).
"""

from __future__ import annotations

_MARKS = ("#SBATCH", "#SLURM")
_SPACE = " \t\n\v\f\r"


def read_directives(script: str) -> tuple[str, ...]:
    """Every option that sbatch reads from a script, in order.

    ``ValueError`` for a line that sbatch refuses to read.  What belongs to the further parts of a
    heterogeneous job is read like the rest.
    """
    options: list[str] = []
    for line in script.split("\n"):
        mark = next((mark for mark in _MARKS if line.startswith(mark)), None)
        if mark is not None:
            options += _words(line[len(mark) :])
        elif not line.lstrip(_SPACE).startswith("#") and line.strip(_SPACE):
            break  # the first command
    return tuple(options)


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
