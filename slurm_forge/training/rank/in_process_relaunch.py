"""Leave the user's function without leaving the process, for a relaunch in the same process.

The launch is over, and the main thread may be anywhere: in a collective that never ends, in a
sleep, in C code.  A signal makes it raise an exception that programs do not catch; collectives are
aborted in parallel.  Used only if the job's policy trusts the process: whatever the program has
changed in it (module globals, caches) carries over into the next launch.

Also here: where an unwound worker waits for its agent's next launch, what its process keeps
between launches, and its channel to the agent.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from signal import Signals
from types import FrameType
from typing import Any

from slurm_forge.control import HUB_GONE, Member
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.agent import StartWorker, decode_agents
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import Notice
from slurm_forge.descendants import kill_helpers
from slurm_forge.errors import ControlChannelError
from slurm_forge.signals import UNWIND_SIGNAL, SignalWatcher

#: A main thread that takes longer is in C code, or catches everything: the process is replaced.
_OUT_WITHIN_S = 3.0
#: Raised again until it takes effect: destructors and callbacks swallow exceptions.
_AGAIN_S = 0.2
#: For our threads that were saving: nothing of theirs may be published during a new launch.
_SAVED_WITHIN_S = 1.0
_SAVING = "forge-save"


class LaunchOver(BaseException):
    """The launch is over; not an error, and not meant to be caught by programs."""


class Unwinding:
    """Gets one rank out of one launch.  Created in the main thread.

    ``leave`` ends the process if that fails, and never returns.
    """

    def __init__(self, leave: Callable[[str], None]) -> None:
        self._leave = leave
        self._main = threading.main_thread().ident or 0
        self._caught = False
        self._started = threading.Event()
        self._out = threading.Event()
        self._aborting: threading.Thread | None = None
        signal.signal(UNWIND_SIGNAL, self._raise)

    @property
    def has_started(self) -> bool:
        """Whether the launch is over: later exceptions are only consequences."""
        return self._started.is_set()

    def __call__(self, reason: str) -> None:
        """Called by the channel's thread when the launch is over.  Returns when the main thread is
        out.

        If that takes more than 3 s the process ends; at once if nobody is left to start another
        launch.
        """
        if reason == HUB_GONE:
            self._leave(reason)
        self._started.set()
        until = time.monotonic() + _OUT_WITHIN_S
        # Raise first, then abort: in an aborted gloo group the next collective waits for ever.
        signal.pthread_kill(self._main, UNWIND_SIGNAL)
        self._abort_groups()
        while not self._caught and time.monotonic() < until:
            signal.pthread_kill(self._main, UNWIND_SIGNAL)
            self._out.wait(_AGAIN_S)
        if not self._out.wait(max(0.0, until - time.monotonic())):
            where = sys._current_frames().get(self._main)
            stack = "".join(traceback.format_stack(where)[-3:]) if where else ""
            sys.stderr.write(f"slurm_forge: the main thread does not unwind:\n{stack}")
            self._leave(f"{reason} (it could not unwind)")

    def run(self, program: Callable[[], Any]) -> Any:
        """Call it in the main thread; raises ``LaunchOver`` in place of consequences of the end."""
        try:
            try:
                return program()
            except LaunchOver:
                self._acknowledge()
                raise
            except BaseException as error:
                if self.has_started:
                    self._acknowledge()
                    raise LaunchOver from error
                raise
        except LaunchOver:
            self._acknowledge()
            raise

    def last_words(self) -> None:
        """Main thread: it is on its way out by itself and must not be interrupted."""
        self._acknowledge()

    def clear(self) -> str:
        """Main thread, after the function: release what is left of the launch; why it failed."""
        self._started.set()
        self._acknowledge()
        self._abort_groups()
        if self._aborting is not None:
            self._aborting.join(_OUT_WITHIN_S)
            if self._aborting.is_alive():
                return "a process group can't be aborted"
        sys.last_traceback = sys.last_value = None
        gc.collect()
        kill_helpers()
        until = time.monotonic() + _SAVED_WITHIN_S
        while any(thread.name == _SAVING for thread in threading.enumerate()):
            if time.monotonic() > until:
                return "a save is still being written"
            time.sleep(0.005)
        return _clear_gpu()

    def over(self) -> None:
        """The main thread is done: the channel's thread may continue."""
        self._out.set()

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        if not self._caught:
            raise LaunchOver

    def _acknowledge(self) -> None:
        while not self._caught:
            try:
                self._caught = True
            except LaunchOver:
                continue

    def _abort_groups(self) -> None:
        """On a separate thread: NCCL may take its time, while the waiting thread has a limit."""
        if self._aborting is None and "torch.distributed" in sys.modules:
            self._aborting = threading.Thread(target=_abort, name="forge-abort", daemon=True)
            self._aborting.start()


def can_unwind() -> bool:
    """Whether this torch can abort all process groups at once (2.6 and later)."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return hasattr(module, "_abort_process_group")


def _abort() -> None:
    import torch.distributed as dist

    from slurm_forge.device.groups import abort_group

    if not (dist.is_available() and dist.is_initialized()):
        return
    # At once: an abort waits for the kernels of its communicator, which may be queued behind those
    # of another.  Torch aborts one after another (pytorch/pytorch#119797).
    aborting = [
        threading.Thread(target=abort_group, args=(group,), daemon=True)
        for group in list(dist.distributed_c10d._world.pg_map)
    ]
    for thread in aborting:
        thread.start()
    for thread in aborting:
        thread.join()
    dist.distributed_c10d._abort_process_group()  # which raises what was suppressed above


def _clear_gpu() -> str:
    from slurm_forge.device.accelerator import in_use, synchronize
    from slurm_forge.device.memory import release_cached

    device = in_use()
    if device is None:
        return ""
    try:
        synchronize(device)  # raises if an error has made the context unusable
        release_cached(device)
    except RuntimeError as error:
        return f"the GPU can't be used any more: {error}"
    return ""


#: A worker's message to its agent once it has unwound; the agent answers with a ``StartWorker``.
PARKED = b"parked\n"


class ParkingPlace:
    """The worker's end of the socket pair with its agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait(self) -> StartWorker | None:
        """Report that nothing of the launch is left, and wait; None if nothing follows."""
        buffer = b""
        try:
            self._connection.sendall(PARKED)
            while not buffer.endswith(b"\n"):
                data = self._connection.recv(1 << 16)
                if not data:
                    return None
                buffer += data
            order = decode_agents(buffer)
        except (OSError, ControlChannelError):
            return None
        return order if isinstance(order, StartWorker) else None


class ParkedWorker:
    """The agent's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        #: Whether the worker waits for an order.
        self.waits = False

    def fileno(self) -> int:
        """For a selector; -1 once closed."""
        return self._connection.fileno()

    def read(self) -> bool:
        """Read; False if the worker's end is closed."""
        try:
            data = self._connection.recv(64)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.waits = self.waits or PARKED in data
        return bool(data)

    def go_on(self, order: Message) -> bool:
        """Send it the next launch; whether that worked."""
        self.waits = False
        with contextlib.suppress(OSError):
            self._connection.sendall(protocol.encode(order))
            return True
        return False

    def close(self) -> None:
        """Close it: the worker is gone, or this process is the child."""
        self._connection.close()


class Channel(Member):
    """A channel that reports whether a message could not be sent any more."""

    mute = False

    def _send(self, message: Message) -> None:
        try:
            super()._send(message)
        except OSError:
            self.mute = True
            raise


class Notices:
    """Sends signals that arrived without a channel as soon as there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._early: list[Signals] = []
        self._member: Member | None = None

    def add(self, signal: Signals) -> None:
        """The process got a signal; called on the watcher's thread."""
        with self._lock:
            if self._member is None:
                self._early.append(signal)
            else:
                self._member.send(Notice(what=signal.name))

    def say_through(self, member: Member | None) -> None:
        """Send past and future signals over that channel; without one, keep them."""
        with self._lock:
            self._member = member
            if member is None:
                return
            early, self._early = self._early, []
        for each in early:
            self.add(each)


class PersistentWorkerState:
    """What a process has once, for all launches that it is a rank of.  Main thread only."""

    def __init__(self) -> None:
        self.notices = Notices()
        self.watcher = SignalWatcher(self.notices.add)
        #: The program, once it is imported: its module state is kept.
        self.entry: Callable[..., Any] | None = None
