"""The processes below a command, and which of them are told that the time is up."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.launch.convention import is_starter, starts_steps

__all__ = ["Below", "Process", "below", "read_marked", "read_processes"]

_PROC = Path("/proc")
_LONGEST_COMMAND = 8192


@dataclass(frozen=True, slots=True)
class Process:
    """One process: its number, its parent's, and the words it was started with."""

    pid: int
    parent: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Below:
    """Who is to be told: processes here, and whether srun has started tasks somewhere."""

    pids: tuple[int, ...]
    steps: bool = False


def read_processes(proc: Path = _PROC) -> tuple[Process, ...]:
    """Every process of this user; what ends while it is looked at is left out."""
    found = []
    me = os.getuid()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != me:
                continue
            # The name in brackets may hold anything, brackets too: what counts is behind the last.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (entry / "cmdline").read_bytes()[:_LONGEST_COMMAND].split(b"\0")[:-1]
        except (OSError, ValueError):
            continue
        if state != "Z":
            given = tuple(word.decode(errors="replace") for word in words)
            found.append(Process(int(entry.name), int(parent), given))
    return tuple(found)


def read_marked(mark: str, proc: Path = _PROC) -> tuple[int, ...]:
    """Processes of this user that were started with ``mark``, NAME=value, in their environment.

    Neither this one nor those that have started it.
    """
    found = []
    wanted = os.fsencode(mark)
    processes = read_processes(proc)
    spared = _line_of(os.getpid(), processes)
    for process in processes:
        try:
            environment = (proc / str(process.pid) / "environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0") and process.pid not in spared:
            found.append(process.pid)
    return tuple(found)


def _line_of(pid: int, processes: Iterable[Process]) -> frozenset[int]:
    """A process and its ancestors."""
    parents = {process.pid: process.parent for process in processes}
    line = {pid}
    while (pid := parents.get(pid, 0)) and pid not in line:
        line.add(pid)
    return frozenset(line)


def below(processes: Iterable[Process], root: int) -> Below:
    """What the launchers and shells from ``root`` on have started: the first that is none of them.

    Not what that starts in turn (workers of a data loader die of a signal that was meant for it).
    A launcher that has started nothing yet is told itself.
    """
    children: defaultdict[int, list[Process]] = defaultdict(list)
    table = {}
    for process in processes:
        children[process.parent].append(process)
        table[process.pid] = process
    pids: list[int] = []
    steps = False
    seen: set[int] = set()
    todo = [table[root]] if root in table else []
    while todo:
        process = todo.pop()
        if process.pid in seen:
            continue
        seen.add(process.pid)
        own = children[process.pid]
        if starts_steps(process.words):
            steps = True
        elif is_starter(process.words) and any(_counts(child.words) for child in own):
            todo += own
        elif _counts(process.words):
            pids.append(process.pid)
    return Below(tuple(sorted(pids)), steps)


def _counts(words: Sequence[str]) -> bool:
    """Not a shell's ``sleep`` in a loop, nor what only passes text on."""
    return bool(words) and words[0].rpartition("/")[2] not in _BESIDE


_BESIDE = frozenset({"sleep", "tee", "cat", "tail", "awk", "sed", "grep", "ts"})
