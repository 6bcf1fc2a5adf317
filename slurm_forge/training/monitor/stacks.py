"""Python stacks of another process, taken without its help, whatever its interpreter is doing.

``py-spy dump`` if it is installed; else the C-level handler of ``faulthandler``, which the worker
has registered on a dedicated signal and which writes into memory shared by both processes: it needs
neither the interpreter's lock nor a file system.  The signal goes to the thread of the control
channel, so that nothing of the program is interrupted.  A stopped process runs no handler: for that
one only the kernel's view is available, unless py-spy is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.signals import STACK_SIGNAL
from slurm_forge.training.monitor.procfs import (
    ProcessFacts,
    catches,
    children_of,
    kernel_words,
    read_process,
)

_STOPPED = frozenset("tTZX")
_DUMP_WITHIN_S = 2.0
_PY_SPY_WITHIN_S = 4.0
_LOOK_EVERY_S = 0.02
#: A dump that has not grown for this long is complete.
_QUIET_S = 0.06
_LARGEST = 1 << 18
#: At most this many data-loader workers have their stacks taken, too.
_MOST_CHILDREN = 8


def dump_on_signal() -> int:
    """In the worker: let ``STACK_SIGNAL`` write all threads' stacks; returns the descriptor.

    Forked data-loader workers inherit it.  ``OSError`` or ``AttributeError`` if that is impossible.
    """
    descriptor = os.memfd_create("forge-stacks", os.MFD_CLOEXEC)
    # CPython registers it with SA_RESTART: restartable system calls are restarted.
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)
    return descriptor


def no_more_dumps(descriptor: int) -> None:
    """Undo ``dump_on_signal``."""
    faulthandler.unregister(STACK_SIGNAL)
    with contextlib.suppress(OSError):
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class StackDump:
    """``whole`` is for the file, ``stacks`` all Python threads of the process, from ``how``."""

    whole: str
    stacks: str
    how: str
    facts: ProcessFacts


class StackDumper:
    """Takes the stacks of one process.  ``dump`` is what ``dump_on_signal`` returned there."""

    def __init__(
        self,
        pid: int,
        dump: int | None,
        *,
        thread: Callable[[], int] = lambda: 0,
        py_spy: str | None = None,
    ) -> None:
        self._pid = pid
        self._dump = dump
        self._thread = thread
        self._py_spy = py_spy or _py_spy()

    def take(self) -> StackDump:
        """Facts, stacks, children's stacks; within about five seconds."""
        facts = read_process(self._pid)
        how, stacks = "nothing", ""
        if self._py_spy is not None and facts.state not in ("", "Z", "X"):
            how, stacks = "py-spy", self._spied(self._pid, stopped=facts.state in _STOPPED)
        if not stacks and facts.state not in _STOPPED:
            how, stacks = "faulthandler", self._dumped(self._pid, self._thread())
        if not stacks:
            how = "nothing"
        parts = [
            f"process {self._pid}  state {facts.state or 'gone'}  processor {facts.cpu_s:.2f} s  "
            f"stacks from {how}",
            stacks,
            kernel_words(self._pid),
        ]
        for child in children_of(self._pid)[:_MOST_CHILDREN]:
            its = self._spied(child) if how == "py-spy" else self._dumped(child, child)
            if its or catches(child, STACK_SIGNAL):
                parts += [f"child {child}  state {read_process(child).state}", its]
        full_text = "\n\n".join(part for part in parts if part) + "\n"
        return StackDump(full_text, stacks, how, facts)

    def _spied(self, pid: int, *, stopped: bool = False) -> str:
        # Otherwise py-spy would wait for a stopped process to stop once more.
        reading = ("--nonblocking",) if stopped else ()
        try:
            result = subprocess.run(
                [self._py_spy or "py-spy", "dump", *reading, "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PY_SPY_WITHIN_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return result.stdout[:_LARGEST].decode(errors="replace") if result.returncode == 0 else ""

    def _dumped(self, pid: int, thread: int) -> str:
        runs_handlers = read_process(pid).state not in _STOPPED
        if self._dump is None or not runs_handlers or not catches(pid, STACK_SIGNAL):
            return ""
        try:
            os.ftruncate(self._dump, 0)
            os.lseek(self._dump, 0, os.SEEK_SET)  # the offset is shared with the writer
            _signal_thread(pid, thread or pid)
        except OSError:
            return ""
        deadline = time.monotonic() + _DUMP_WITHIN_S
        size, grew = 0, time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
            now = os.fstat(self._dump).st_size
            if now != size:
                size, grew = now, time.monotonic()
            elif size and time.monotonic() - grew >= _QUIET_S:
                break
        return os.pread(self._dump, min(size, _LARGEST), 0).decode(errors="replace")


def _signal_thread(pid: int, thread: int) -> None:
    """Signal one thread of the process, or the process if the C library can't."""
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if tgkill is None or tgkill(pid, thread, int(STACK_SIGNAL)) != 0:
        os.kill(pid, STACK_SIGNAL)


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
