"""Somebody's own script as a successor of its job is submitted with it.

What stood on the command line of sbatch is not in the script that Slurm keeps: of an array the
successor is to be one task again, and a script with arguments must get the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from io import StringIO
from pathlib import Path, PurePath

from slurm_forge.slurm.records import JobRecord

_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})


def for_successor(
    text: str, *, array_task: int | None = None, arguments: Sequence[str] = ()
) -> str | None:
    """The script with what it was submitted with; None where that can't be written into it.

    sbatch reads its options up to the first line that is no comment, and the last one counts.
    """
    if not text.startswith("#!") or (arguments and not _is_shell(text)):
        return None
    lines = StringIO(text, newline="\n").readlines()
    at = next(
        (n for n, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines)
    )
    added = []
    if array_task is not None:
        added.append(f"#SBATCH --array={array_task}\n")
    if arguments:
        added.append(f"set -- {shlex.join(arguments)}\n")
    if added and lines[at - len(added) : at] == added:
        return text  # of a successor
    if added and not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    return "".join([*lines[:at], *added, *lines[at:]])


def arguments_of(record: JobRecord) -> list[str]:
    """What the script was given, by what Slurm shows: its words, joined by spaces.

    Newer versions show the path alone as the command, and the words in the line of sbatch.
    """
    command = record.command or ""
    if record.submit_line is None:
        return [] if Path(command).is_file() else command.split()[1:]
    words = record.submit_line.split()
    script = PurePath(command.split(" ", 1)[0]).name
    at = [n for n, word in enumerate(words) if n and PurePath(word).name == script]
    return words[at[0] + 1 :] if at else []


def _is_shell(text: str) -> bool:
    words = text[2:].split("\n", 1)[0].split()
    names = [PurePath(word).name for word in words if not word.startswith("-")]
    return bool(names) and (names[1] if names[0] == "env" and names[1:] else names[0]) in _SHELLS
