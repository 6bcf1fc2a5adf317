"""What a worker has started, and how all of it is ended for sure.

Whoever calls ``adopt_orphans`` becomes the parent of every descendant whose own parent is gone, in
whatever session or process group it is.  So one can go by children alone: kill them, collect them,
and look again until there are none.  A child that was not collected keeps its process id, so that
nobody else is ever hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_MOST_NAMED = 4


def adopt_orphans() -> bool:
    """Whether the kernel makes this process the parent of orphans below it (Linux 3.4)."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process with its parent's thread; exits where that is gone."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0))


def children() -> tuple[int, ...]:
    """Process ids of all children, adopted ones and those that are dead but not collected too."""
    try:
        text = "".join(
            (task / "children").read_text() for task in (_PROC / "self" / "task").iterdir()
        )
        return tuple(int(word) for word in text.split())
    except (OSError, ValueError):  # a kernel without CONFIG_PROC_CHILDREN
        return tuple(sorted(_children_by_stat()))


def _children_by_stat() -> list[int]:
    me, pids = os.getpid(), []
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == me:
                    pids.append(int(entry.name))
    return pids


def reap(pid: int) -> int | None:
    """The wait status of a child that has ended, which is collected by that; None if it lives.

    ``ChildProcessError`` where it is no child (any more).
    """
    done, status = os.waitpid(pid, os.WNOHANG)
    return status if done == pid else None


def kill_children(but: frozenset[int] = frozenset()) -> int:
    """SIGKILL for every child not in ``but``, collecting what has ended; how many are left.

    One that was collected counts, too: what it had started may have come to us since we looked.  So
    nothing is left only when the last look found nothing, and the kernel says so.
    """
    left = 0
    for pid in children():
        if pid in but:
            continue
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            left += 1
            if reap(pid) is None:
                os.kill(pid, signal.SIGKILL)
    # The list of children may lack one where another ends while it is read (proc(5)).
    return left if left or but else int(_has_children())


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def what_is_left(pids: tuple[int, ...]) -> str:
    """Names and states of processes, for a message: ``python (4711, state D)``."""
    processes = []
    for pid in pids[:_MOST_NAMED]:
        with contextlib.suppress(OSError, IndexError):
            text = (_PROC / str(pid) / "stat").read_text()
            name = text.partition("(")[2].rpartition(")")[0]
            processes.append(f"{name} ({pid}, state {text.rpartition(')')[2].split()[0]})")
    more = len(pids) - _MOST_NAMED
    return ", ".join(processes) + (f" and {more} more" if more > 0 else "")


def kill_helpers(within_s: float = 1.0) -> None:
    """End what this very process has started (data-loader workers), and nothing that it needs.

    Python's resource tracker stays; whatever a child has started is left to the agent.
    """
    from multiprocessing import resource_tracker

    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    spared = frozenset() if tracker is None else frozenset({tracker})
    until = time.monotonic() + within_s
    while kill_children(spared) and time.monotonic() < until:
        time.sleep(0.002)
