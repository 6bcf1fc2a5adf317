"""Processes that are named so that a recycled process id can't be mistaken for them.

A process is its id plus its start time (proc(5), field 22 of /proc/pid/stat): the pair does not
come back before the machine is booted again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """One process; ``started`` in clock ticks since the machine's boot."""

    pid: int
    started: int


def boot_id() -> str:
    """Changes with every boot: process references of another boot mean nothing."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def refer(pid: int) -> ProcessRef | None:
    """The process that has this id now; None where there is none, or only its zombie."""
    fields = _stat(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return ProcessRef(pid, int(fields[19]))


def is_alive(process: ProcessRef) -> bool:
    """Whether this very process still runs.  A zombie does not."""
    return refer(process.pid) == process


def kill(process: ProcessRef, number: signal.Signals) -> bool:
    """Send a signal to this very process; False where it is gone."""
    if not is_alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def stop(processes: Iterable[ProcessRef], *, patience_s: float) -> None:
    """SIGTERM to all, SIGKILL to those alive after ``patience_s``; back when all are dead."""
    listed = tuple(processes)
    for process in listed:
        kill(process, signal.SIGTERM)
        kill(process, signal.SIGCONT)  # a frozen one would never see the SIGTERM
    if wait_until(lambda: not any(map(is_alive, listed)), timeout_s=patience_s):
        return
    for process in listed:
        kill(process, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, listed)), timeout_s=patience_s)


def wait_until(
    condition: Callable[[], bool], *, timeout_s: float, every_s: float = _POLL_S
) -> bool:
    """Ask until the answer is yes; False where it never was within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True


def with_environment(*settings: str) -> Iterator[ProcessRef]:
    """The processes that were started with every one of these ``NAME=value`` (or ``NAME=``)."""
    wanted = [setting.encode() for setting in settings]
    for pid in _pids():
        with contextlib.suppress(OSError):
            entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if all(any(_matches(entry, want) for entry in entries) for want in wanted):
                process = refer(pid)
                if process is not None:
                    yield process


def with_file_below(name: str, prefix: str) -> Iterator[ProcessRef]:
    """The processes called ``name`` that hold a file open whose path starts with ``prefix``.

    slurmstepd overwrites its environment with its title, but keeps its node's log open.
    """
    for pid in _pids():
        with contextlib.suppress(OSError):
            if (_PROC / str(pid) / "comm").read_text().strip() != name:
                continue
            if any(target.startswith(prefix) for target in _open_files(pid)):
                process = refer(pid)
                if process is not None:
                    yield process


def command_line(process: ProcessRef) -> tuple[str, ...]:
    """The words that the process was started with; none where it is gone."""
    try:
        text = (_PROC / str(process.pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(text.decode(errors="replace").split("\0")) if is_alive(process) else ()


def environment(process: ProcessRef) -> Mapping[str, str]:
    """The settings that the process was started with; none where it is gone."""
    try:
        entries = (_PROC / str(process.pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    if not is_alive(process):
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries)
    return {name: value for name, equals, value in pairs if equals}


def parent(process: ProcessRef) -> int | None:
    """The id of the process's parent now; None where it is gone."""
    fields = _stat(process.pid)
    return int(fields[1]) if fields is not None and is_alive(process) else None


def descendants(roots: Iterable[ProcessRef]) -> tuple[ProcessRef, ...]:
    """Everything that was forked below ``roots`` and is still attached to them."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    result: list[ProcessRef] = []
    queue = [root.pid for root in roots]
    while queue:
        for pid in children.get(queue.pop(), []):
            queue.append(pid)
            process = refer(pid)
            if process is not None:
                result.append(process)
    return tuple(result)


def _matches(entry: bytes, want: bytes) -> bool:
    return entry.startswith(want) if want.endswith(b"=") else entry == want


def _open_files(pid: int) -> Iterator[str]:
    for entry in (_PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(entry.readlink())


def _pids() -> tuple[int, ...]:
    return tuple(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/pid/stat from the third (state) on."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    # The second field, the command in parentheses, may itself hold blanks and parentheses.
    return text.rpartition(")")[2].split()
