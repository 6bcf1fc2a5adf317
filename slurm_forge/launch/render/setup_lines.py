"""What a setup in front of the supervisor may not do: take the script's own traps away."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from slurm_forge.errors import ConfigError

__all__ = ["refuse_traps"]

#: By name or number, as bash takes them; 0 is EXIT.
_OURS = {
    "EXIT": "EXIT", "0": "EXIT", "ERR": "ERR", "HUP": "HUP", "1": "HUP", "INT": "INT", "2": "INT",
    "TERM": "TERM", "15": "TERM", "USR1": "USR1", "10": "USR1", "USR2": "USR2", "12": "USR2",
}  # fmt: skip
#: After these a command begins.
_BEFORE = frozenset({"then", "do", "else", "{", "!", "builtin", "command", "time"})
_ENDS = ";|&()\n"
_PLAIN = re.compile(r"^(?:[^#]*[;&|({]\s*)?(?:builtin\s+)?trap\s+(.*)$", re.MULTILINE)


def refuse_traps(lines: Iterable[str], where: str) -> None:
    """``ConfigError`` for a ``trap`` on what the batch script itself has to hear of.

    Whatever the setup sources is not looked into: the script sets its traps again after it.
    """
    taken = sorted(set(_trapped("\n".join(lines))))
    if taken:
        raise ConfigError(
            f"{where}: a trap on {', '.join(taken)} replaces that of the batch script, by which a "
            "start that fails is told and not lost",
            next_step="Leave the trap out: put the commands that need it into a script of their "
            "own, and run that from the setup.",
        )


def _trapped(text: str) -> list[str]:
    words = _words(text)
    if words is None:  # quotes that only bash understands
        found = [word for rest in _PLAIN.findall(text) for word in re.split(r"[\s;&|)}]+", rest)]
        return [name for word in found if (name := _name(word)) and not word.isdigit()]
    taken: list[str] = []
    first, at = True, 0
    while at < len(words):
        word = words[at]
        at += 1
        if word.startswith("#"):
            while at < len(words) and words[at] != "\n":
                at += 1
        elif first and word == "trap":
            arguments = []
            while at < len(words) and words[at].strip(_ENDS):
                arguments.append(words[at])
                at += 1
            taken += [name for each in _signals(arguments) if (name := _name(each))]
        first = not word.strip(_ENDS) or word in _BEFORE
    return taken


def _signals(arguments: list[str]) -> list[str]:
    given = [each for each in arguments if each != "--"]
    if given and given[0] in ("-p", "-l"):
        return []  # only shown
    # With one word alone it is the signal, and its trap is taken away.
    return given[1:] if len(given) > 1 else given


def _name(word: str) -> str | None:
    return _OURS.get(word.upper().removeprefix("SIG"))


def _words(text: str) -> list[str] | None:
    """Words and what stands between commands; None where the text can't be split like that."""
    reader = shlex.shlex(text, posix=True, punctuation_chars=_ENDS)
    reader.whitespace, reader.commenters = " \t\r", ""
    try:
        found = list(reader)
    except ValueError:
        return None
    words: list[str] = []
    for word in found:
        # Runs of punctuation come as one word.
        words += ["\n"] if word and not word.strip(_ENDS) else [word]
    return words
