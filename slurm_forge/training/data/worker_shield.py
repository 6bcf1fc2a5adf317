"""Data-loader workers that outlive a group-wide signal and still obey their parent.

With process tracking by ``linuxproc`` (and ``SignalChildrenProcesses=yes``) Slurm signals every
process of a step.  A worker that dies of that SIGTERM deprives the rank of data just when it needs
a few more batches to reach the step at which all ranks save.  A worker that ignores SIGTERM can't
be ended by the rank any more, and a rank that waits for it at its exit hangs.

So a worker must know the sender of the signal.  Only ``sigwaitinfo`` reveals it, and it needs the
signal to be blocked: it is, in the worker alone (a rank blocks nothing while it trains), and a
thread receives it, even while the dataset is in a sleep or a C call.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

_PR_SET_PDEATHSIG = 1
#: Seconds between checks whether the parent lives, if the kernel does not watch it for us.
_PARENT_CHECK_S = 0.5
_OTHERS = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def children_deaf_from_birth(start_method: str = "fork") -> Iterator[None]:
    """Processes started inside hold signals back until ``shield_worker`` has set them up.

    Without it a worker is unprotected while it starts, and under ``spawn`` for ever: libraries
    start threads while they are imported, before any code of ours runs, and a signal that one
    thread does not block is taken by that thread.  Only the calling thread's mask changes, and is
    restored; start no threads of your own in here.
    """
    if start_method != "fork":
        # Its start ends with unblocking SIGTERM, which must not happen while workers are starting.
        with _deaf():
            resource_tracker.ensure_running()
    with _deaf():
        yield


@contextmanager
def _deaf() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, *_OTHERS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shield_worker(worker_id: int = 0) -> None:
    """Make this data-loader worker survive signals that its parent did not send.

    Pass it to a ``DataLoader`` of your own as ``worker_init_fn``; ``Run.batches`` does so by
    itself.  (A signal that comes before the worker has begun needs ``children_deaf_from_birth``
    around the making of the loader's iterator, too.)  Afterwards SIGTERM ends the worker if the
    parent sent it and is ignored otherwise, SIGUSR1 and SIGUSR2 are ignored, and the worker ends
    with its parent.  It does nothing outside a process that ``multiprocessing`` started.

    Limits: programs that the dataset starts inherit the blocked SIGTERM (end them with ``kill()``).
    A C call that holds the interpreter lock delays the end until it returns.  Where another thread
    can receive the signal, SIGTERM keeps torch's handler (it ends the worker, whoever sent it) with
    a warning; that is the case under ``forkserver``, whose server does not survive such a signal
    either.

    Args:
        worker_id: The worker's number, which a ``DataLoader`` passes; not used.
    """
    parent = multiprocessing.parent_process()
    if parent is None or threading.current_thread() is not threading.main_thread():
        return
    _die_with(parent)
    signal.set_wakeup_fd(-1)  # the rank's: it must not get this process's signals
    for number in _OTHERS:
        signal.signal(number, signal.SIG_IGN)
    # Until here torch's handler obeys the parent, from here on the signal waits for _obey.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    blocked = {signal.SIGTERM}
    if _somebody_listens(signal.SIGTERM):
        blocked.clear()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        warnings.warn(
            "a thread started before shield_worker takes SIGTERM: a signal to the whole group ends "
            "this worker.  Start the loader inside children_deaf_from_birth(), not by forkserver.",
            RuntimeWarning,
            stacklevel=2,
        )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OTHERS)
    threading.Thread(
        target=_obey, args=(parent, os.getppid(), blocked), name="forge-shield", daemon=True
    ).start()


def _somebody_listens(number: signal.Signals) -> bool:
    """Whether some thread of this process does not block the signal (Linux)."""
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except OSError:
            continue  # it ended meanwhile
        blocked = next((line for line in status.splitlines() if line.startswith("SigBlk:")), "")
        if not int(blocked.partition(":")[2] or "0", 16) >> (number - 1) & 1:
            return True
    return False


def _die_with(parent: BaseProcess) -> None:
    """Make the kernel kill this process when the parent ends; exit if it is gone already."""
    if os.getppid() == parent.pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent.pid and _is_gone(parent):
        os._exit(1)  # it ended before the request to the kernel


def _obey(parent: BaseProcess, guardian: int, blocked: set[signal.Signals]) -> None:
    """Receive every SIGTERM; exit on one from the parent, and when the parent is gone.

    ``guardian`` is the process that forked this one: the parent, or its fork server.
    """
    while True:
        received = signal.sigtimedwait(blocked, _PARENT_CHECK_S)
        if received is not None and received.si_pid in (parent.pid, guardian):
            # Like torch's own handler: success, and no clean-up that could block.
            os._exit(0)
        if os.getppid() != guardian or (guardian != parent.pid and _is_gone(parent)):
            os._exit(1)


def _is_gone(parent: BaseProcess) -> bool:
    # The pid answers for a forked process, whose brothers hold the other end of its pipe open; the
    # pipe answers for a fork server's, whose parent may be dead and not yet collected.
    try:
        os.kill(parent.pid or 0, 0)
    except OSError:
        return True
    return not parent.is_alive()
