"""The kernel's view of another process of this node: facts from ``/proc``, without waiting."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_MOST = 4096
#: The 52nd field of proc(5), counted from the state, which is the third.
_EXIT_CODE = 49


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """State letter (R, S, D, T, t, Z; empty: no process), and processor seconds used so far."""

    state: str
    cpu_s: float


def parse_stat(text: str, ticks_per_second: int) -> ProcessFacts:
    """Parse ``/proc/<pid>/stat`` (proc(5)); ``ValueError`` for anything else.

    The name in parentheses may contain anything, including parentheses and spaces.
    """
    _, bracket, rest = text.rpartition(")")
    words = rest.split()
    if not bracket or len(words) < 13:
        raise ValueError(f"not a line of /proc/<pid>/stat: {text[:60]!r}")
    return ProcessFacts(words[0], (int(words[11]) + int(words[12])) / ticks_per_second)


def read_process(pid: int) -> ProcessFacts:
    """State and processor time of a process, all its threads together."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        return parse_stat(text, os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return ProcessFacts("", 0.0)


def exit_status(pid: int) -> int | None:
    """How a process ended that its parent has not reaped yet: minus the number of a signal.

    None if it lives, has been reaped already, or the kernel does not tell.
    """
    try:
        words = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(words[_EXIT_CODE])) if words[0] == "Z" else None
    except (OSError, ValueError, IndexError):
        return None


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for that signal, which would otherwise end it."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
        return bool(int(mask, 16) >> (number - 1) & 1)
    except (OSError, ValueError, StopIteration, IndexError):
        return False


def children_of(pid: int) -> tuple[int, ...]:
    """Direct children of all its threads."""
    children: set[int] = set()
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            try:
                children.update(map(int, (task / "children").read_text().split()))
            except (OSError, ValueError):
                continue  # it ended meanwhile, or the kernel does not tell
    except OSError:
        return ()
    return tuple(sorted(children))


def kernel_words(pid: int) -> str:
    """The readable part of the kernel's view: where each thread waits, and the main one's stack."""
    lines = []
    try:
        tasks = sorted((_PROC / str(pid) / "task").iterdir(), key=lambda path: int(path.name))
    except (OSError, ValueError):
        return ""
    for task in tasks[:64]:
        facts = [_read(task / name) for name in ("comm", "wchan", "syscall")]
        state = _read(task / "stat").rpartition(")")[2].split()[:1]
        lines.append(f"thread {task.name} {' '.join(state)} {' | '.join(facts)}")
    stack = _read(_PROC / str(pid) / "stack")  # usually readable by root only
    if stack:
        lines += ["kernel stack of the main thread:", stack]
    return "\n".join(lines)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST).decode(errors="replace").strip()
    except OSError:
        return ""
