"""Real ranks for tests: forked from this process, which has torch imported already.

    from tests.distributed.ranks import run_ranks

    def body(rank, name):
        total = torch.ones(1)
        dist.all_reduce(total)
        return name, rank, total.item()

    assert run_ranks(2, body, "x", timeout=20) == [("x", 0, 2.0), ("x", 1, 2.0)]

Forking costs milliseconds where a fresh interpreter costs a second of imports, and any callable
(a closure, a lambda) and any argument can be handed over as it is.  Every rank gets a gloo default
group (through a FileStore, so no port can be taken), one thread, default signal handlers, a process
group of its own, and its output in a log file.  At the deadline, and shortly after the first
failure, all that is left is asked for its Python stacks and killed; the error shows everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

# What ranks would import on their own: DDP and FSDP2 both pull in torch._dynamo, 0.7 s each time.
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor

#: Not used by Slurm, by torch, or by the code under test.
STACKS_SIGNAL = signal.SIGRTMAX - 1
_PR_SET_PDEATHSIG = 1
_LOG_TAIL = 6000


class RanksFailedError(AssertionError):
    """A rank raised, died, or was still running at the deadline; the text shows what it knew."""

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


@dataclass
class Outcome:
    """How one rank ended: ``value`` where ``ok``, else ``error`` (a traceback), ``exitcode``."""

    rank: int
    pid: int
    ok: bool = False
    value: Any = None
    error: str = ""
    exception: BaseException | None = None
    exitcode: int | None = None
    log: str = ""
    overdue: bool = False

    def __str__(self) -> str:
        if self.ok:
            return f"--- rank {self.rank} (pid {self.pid}): finished\n"
        how = f"exit code {self.exitcode}"
        if self.exitcode is not None and self.exitcode < 0:
            how = f"killed by {signal.Signals(-self.exitcode).name}"
        if self.overdue:
            how = "still running at the deadline"
        text = f"--- rank {self.rank} (pid {self.pid}): {how}\n"
        if self.error:
            text += f"{self.error.rstrip()}\n"
        if self.log.strip():
            text += f"    log:\n{self.log[-_LOG_TAIL:].rstrip()}\n"
        return text


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 30.0,
    grace: float = 5.0,
    init: bool = True,
    pg_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(rank, *args)`` on every rank and return the results, in rank order.

    ``init=False`` leaves the default process group alone.  ``pg_timeout`` is the group's (seconds;
    the deadline unless told).  ``grace`` is how long the others may go on after the first failure.
    Raises RanksFailedError with tracebacks, logs and stacks of all ranks unless all of them
    returned within ``timeout`` seconds.
    """
    with start_ranks(
        world_size, fn, *args, init=init, pg_timeout=pg_timeout or timeout, env=env
    ) as group:
        outcomes = group.wait(timeout, grace=grace)
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailedError(
            f"{sum(not o.ok for o in outcomes)} of {world_size} ranks failed\n"
            + "".join(map(str, outcomes)),
            outcomes,
        )
    return [outcome.value for outcome in outcomes]


@contextlib.contextmanager
def start_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    init: bool = True,
    pg_timeout: float = 30.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[RankGroup]:
    """Start the ranks and hand over their group, for tests that kill, stop or signal some of them.

    Leaving the block kills what is left.
    """
    folder = Path(tempfile.mkdtemp(prefix="forge-ranks-"))
    group = RankGroup(folder)
    try:
        for rank in range(world_size):
            spec = _Spec(rank, world_size, folder, fn, args, init, pg_timeout, dict(env or {}))
            group.fork(spec)
        yield group
    finally:
        group.close()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Spec:
    rank: int
    world_size: int
    folder: Path
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    init: bool
    pg_timeout: float
    env: dict[str, str]


@dataclass
class _Rank:
    pid: int
    alive: int  # read end of a pipe that only the rank holds open: readable means it is gone
    done: int  # read end of a pipe: a byte means that the rank's result lies in its file
    exitcode: int | None = None
    reported: bool = False


@dataclass
class RankGroup:
    """The running ranks.  ``pids`` in rank order; ``kill`` one; ``wait`` for all."""

    folder: Path
    ranks: list[_Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Ranks that are done wait for the end of this pipe: a rank that closed its sockets
        # while another is still in the last collective would make that one fail.
        self._release_read, self._release_write = os.pipe()
        self._released = False

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [rank.pid for rank in self.ranks]

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one rank (not to its children)."""
        if self.ranks[rank].exitcode is None:
            os.kill(self.ranks[rank].pid, signum)

    def fork(self, spec: _Spec) -> None:
        """Start one rank."""
        alive_read, alive_write = os.pipe()
        done_read, done_write = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with warnings.catch_warnings():
            # Forking a process with threads is what this helper is for; torch's are idle.
            warnings.simplefilter("ignore", DeprecationWarning)
            parent = os.getpid()
            pid = os.fork()
        if pid == 0:
            code = 70
            try:
                for fd in (self._release_write, alive_read, done_read):
                    os.close(fd)
                for other in self.ranks:
                    os.close(other.alive)
                    os.close(other.done)
                code = _rank_main(spec, parent, done_write, self._release_read)
            finally:
                os._exit(code)
        os.close(alive_write)
        os.close(done_write)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self.ranks.append(_Rank(pid, alive_read, done_read))

    def wait(self, timeout: float, *, grace: float = 5.0) -> list[Outcome]:
        """Wait for all ranks; never raises for what a rank did, and leaves none running.

        After ``timeout`` seconds, or ``grace`` seconds after a first failure, the rest is asked
        for stacks and killed.
        """
        deadline = time.monotonic() + timeout
        shortened = False
        while not all(rank.reported or rank.exitcode is not None for rank in self.ranks):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            self._poll(min(remaining, 0.5))
            if not shortened and any(self._failed(index) for index in range(len(self.ranks))):
                shortened = True
                deadline = min(deadline, time.monotonic() + grace)
        overdue = {
            i for i, rank in enumerate(self.ranks) if not rank.reported and rank.exitcode is None
        }
        if overdue:
            self._dump_stacks(overdue)
        self._end(keep={i for i in range(len(self.ranks)) if i not in overdue})
        return [self._outcome(index, index in overdue) for index in range(len(self.ranks))]

    def close(self) -> None:
        """Kill what is left and free the pipes; may be called twice."""
        self._end(keep=set())
        for rank in self.ranks:
            for fd in (rank.alive, rank.done):
                with contextlib.suppress(OSError):
                    os.close(fd)
        with contextlib.suppress(OSError):
            os.close(self._release_read)
        self.ranks.clear()

    def _poll(self, seconds: float) -> None:
        watched: dict[int, _Rank] = {}
        for rank in self.ranks:
            if rank.exitcode is None:
                watched[rank.alive] = rank
                if not rank.reported:
                    watched[rank.done] = rank
        for fd in connection.wait(list(watched), seconds):
            rank = watched[fd]
            if fd == rank.done and os.read(fd, 1):
                rank.reported = True
        # A grandchild may hold the pipe open, or a rank may be gone without its pipe: ask both.
        for rank in self.ranks:
            self._reap(rank)

    def _reap(self, rank: _Rank, *, block: bool = False) -> None:
        if rank.exitcode is None:
            try:
                pid, status = os.waitpid(rank.pid, 0 if block else os.WNOHANG)
            except ChildProcessError:
                rank.exitcode = 255
                return
            if pid:
                rank.exitcode = os.waitstatus_to_exitcode(status)

    def _failed(self, index: int) -> bool:
        rank = self.ranks[index]
        if rank.exitcode is not None:
            return rank.exitcode != 0 or not rank.reported
        return rank.reported and not self._report(index).get("ok", False)

    def _report(self, index: int) -> dict[str, Any]:
        try:
            return pickle.loads((self.folder / f"result-{index}").read_bytes())
        except (OSError, pickle.UnpicklingError, EOFError):
            return {}

    def _dump_stacks(self, indices: set[int]) -> None:
        logs = [self.folder / f"log-{index}" for index in indices]
        before = [log.stat().st_size if log.exists() else 0 for log in logs]
        for index in indices:
            with contextlib.suppress(OSError):
                os.kill(self.ranks[index].pid, signal.SIGCONT)
                os.kill(self.ranks[index].pid, STACKS_SIGNAL)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            now = [log.stat().st_size if log.exists() else 0 for log in logs]
            if all(a < b for a, b in zip(before, now, strict=True)):
                break
            threading.Event().wait(0.02)

    def _end(self, keep: set[int]) -> None:
        if not self._released:
            self._released = True
            os.close(self._release_write)
        for index, rank in enumerate(self.ranks):
            if index in keep and rank.exitcode is None:
                deadline = time.monotonic() + 5.0
                while rank.exitcode is None and time.monotonic() < deadline:
                    connection.wait([rank.alive], 0.05)
                    self._reap(rank)
            # The group, also when the rank is gone: it may have left children behind.
            with contextlib.suppress(OSError):
                os.killpg(rank.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                if rank.exitcode is None:
                    os.kill(rank.pid, signal.SIGKILL)
            self._reap(rank, block=True)

    def _outcome(self, index: int, overdue: bool) -> Outcome:
        rank, report = self.ranks[index], self._report(index)
        log = self.folder / f"log-{index}"
        return Outcome(
            rank=index,
            pid=rank.pid,
            ok=bool(report.get("ok")) and not overdue,
            value=report.get("value"),
            error=report.get("error", ""),
            exception=report.get("exception"),
            exitcode=rank.exitcode,
            log=log.read_text(errors="replace") if log.exists() else "",
            overdue=overdue,
        )


def _rank_main(spec: _Spec, parent: int, done_fd: int, release_fd: int) -> int:
    """The rank's whole life; returns its exit status."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 71
    _redirect_output(spec.folder / f"log-{spec.rank}")
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)
    # The parent's OpenMP threads do not exist here; with one thread none is ever asked for.
    # Accelerate sets more unless the variable is there.
    torch.set_num_threads(1)
    os.environ.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **spec.env})
    try:
        if spec.init:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{spec.folder / 'store'}",
                rank=spec.rank,
                world_size=spec.world_size,
                timeout=timedelta(seconds=spec.pg_timeout),
            )
            # Connected before anybody starts: else a rank that fails at once fails the others
            # in the rendezvous, and their errors hide the one that matters.
            dist.barrier()
        report: dict[str, Any] = {"ok": True, "value": spec.fn(spec.rank, *spec.args)}
    except BaseException as error:
        report = {"ok": False, "error": traceback.format_exc(), "exception": error}
    try:
        data = pickle.dumps(report)
    except Exception:
        report["ok"] = False
        report["error"] = report.get("error") or f"not picklable:\n{traceback.format_exc()}"
        data = pickle.dumps({"ok": False, "error": report["error"]})
    (spec.folder / f"result-{spec.rank}").write_bytes(data)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.write(done_fd, b"x")
    if report["ok"]:
        os.read(release_fd, 1)
    return 0 if report["ok"] else 1


def _redirect_output(path: Path) -> None:
    """Send output to the log file and take input from nowhere."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
