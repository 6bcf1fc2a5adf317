"""What stands between Slurm and a launcher: the process ``shield … -- COMMAND``.

By default Slurm signals the direct children of slurmstepd and nobody else, and what is started
there (torchrun, a container) does with a signal what it likes: torchrun ends its ranks 30 seconds
later, whatever the grace time is.  So the direct child is this: it records a signal, tells the
supervisor, which has the ranks save over their own channel, and passes on only what it was told to
(``--pass=SIGTERM``, for programs that have no channel).  It ends when the command does, with the
same status, and leaves nothing of it behind.  One thread for signals; imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.handshake import Credentials, Role, dial
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.agent import AgentHello, AgentNotice
from slurm_forge.descendants import (
    adopt_orphans,
    children,
    die_with_parent,
    kill_children,
    what_is_left,
)
from slurm_forge.errors import ForgeError
from slurm_forge.knobs import Knobs, process_environ, torchrun_variables
from slurm_forge.launch.render.container_environment import container_environment
from slurm_forge.signals import SAVE_SIGNALS
from slurm_forge.slurm.environment import SlurmEnvironment

_CONNECT_S = 30.0
_END_WITHIN_S = 5.0
_LAST_WORDS_S = 1.0


class SignalReporter:
    """Tells the supervisor of signals, from a thread: connecting may take its time."""

    def __init__(self, hello: AgentHello, addresses: str, credentials: Credentials) -> None:
        self._hello = hello
        self._credentials = credentials
        self._addresses = addresses
        self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_names, name="forge-shield", daemon=True)
        self._thread.start()

    def report(self, name: str) -> None:
        """Say that a signal came."""
        self._names.put(name)

    def close(self) -> None:
        """Wait a moment until everything is said."""
        self._names.put(None)
        self._thread.join(_LAST_WORDS_S)

    def _send_names(self) -> None:
        try:
            hosts, port = parse_addresses(self._addresses)
            connection = dial(
                hosts,
                port,
                self._credentials,
                Role.AGENT,
                protocol.encode(self._hello),
                who=f"the shield of task {self._hello.rank}",
                within_s=_CONNECT_S,
            )
        except (ForgeError, ValueError) as error:
            _say(f"signals can't be reported to the supervisor: {error}")
            return
        with contextlib.suppress(OSError), contextlib.closing(connection):
            while (name := self._names.get()) is not None:
                connection.send(protocol.encode(AgentNotice(what=name)))


def filled(
    words: Sequence[str], environment: SlurmEnvironment | None, variables: Mapping[str, str]
) -> tuple[str, ...]:
    """The command, with what is another on each node: whole words, and only these four.

    ``--nnodes={nnodes}``, ``--node-rank={node_rank}``, ``--master-addr={master_addr}`` and
    ``--master-port={master_port}``.  ``ForgeError`` where one is needed and not known.
    """
    values = {
        "--nnodes={nnodes}": None if environment is None else environment.ntasks,
        "--node-rank={node_rank}": None if environment is None else environment.procid,
        "--master-addr={master_addr}": variables.get("MASTER_ADDR"),
        "--master-port={master_port}": variables.get("MASTER_PORT"),
    }
    command = []
    for word in words:
        if word not in values:
            command.append(word)
            continue
        value = values[word]
        if value is None:
            raise ForgeError(
                f"no value known for {word}",
                next_step="The shield is started by srun, under slurm-forge's supervisor: hand the "
                "script to sbatch.",
            )
        command.append(f"{word.partition('=')[0]}={value}")
    return tuple(command)


def variables_for(
    words: Sequence[str],
    environment: SlurmEnvironment | None,
    variables: Mapping[str, str],
    *,
    of_shield: bool,
) -> dict[str, str]:
    """The command's environment: which ranks torchrun numbers, and what a container may forget.

    ``of_shield``: the ranks get signals over their own channel.
    """
    result = dict(variables)
    if "--node-rank={node_rank}" in words and environment is not None:
        step = f"{environment.job_id}.{environment.step}"
        result.update(torchrun_variables(step, own_step=of_shield))
    return container_environment(words, result)


def ranks_below(root: int, proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Processes below the command that lead a session, as torchrun's workers do; else itself.

    Nothing below those: what a rank has started dies of a signal that is meant for the rank.
    """
    above: dict[int, int] = {}
    leads: set[int] = set()
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                above[int(entry.name)] = int(fields[1])
                if int(fields[3]) == int(entry.name):
                    leads.add(int(entry.name))
    leads.discard(root)
    return tuple(sorted(pid for pid in leads if _is_below(pid, root, above, leads))) or (root,)


def _is_below(pid: int, root: int, above: Mapping[int, int], leads: set[int]) -> bool:
    """Whether the way from a process up to ``root`` passes nobody who leads a session."""
    visited = {pid}
    while (pid := above.get(pid, 0)) not in visited:
        if pid == root:
            return True
        if pid in leads or pid == 0:
            return False
        visited.add(pid)
    return False


class _Shield:
    """One command, from its start to the last of what it has started."""

    def __init__(self, passes: frozenset[str]) -> None:
        self._passes = passes
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (*SAVE_SIGNALS, signal.SIGCHLD):
            signal.signal(number, _recorded)
        self._child = 0
        self._status: int | None = None

    def start(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start it, below us whatever it does; without threads so far."""
        adopt_orphans()
        me = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._child = os.fork()
        if self._child == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                # Some Slurms signal every process of a step.  Our ranks install their own
                # handlers; what starts them is to live on until they have saved.
                for number in SAVE_SIGNALS:
                    signal.signal(number, signal.SIG_DFL if self._passes else signal.SIG_IGN)
                die_with_parent(me)
                os.execvpe(words[0], list(words), dict(variables))  # noqa: S606
            except OSError as error:
                _say(f"{words[0]} can't be started: {error.strerror or error}")
            finally:
                os._exit(127)

    def watch(self, reporter: SignalReporter | None) -> int:
        """Until the command has ended; its wait status."""
        while self._status is None:
            for number in os.read(self._reader, 64):
                if number == signal.SIGCHLD:
                    self._collect()
                elif number in SAVE_SIGNALS:
                    name = signal.Signals(number).name
                    if reporter is not None:
                        reporter.report(name)
                    if name in self._passes:
                        self._pass_on(number)
        return self._status

    def _collect(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._status = status

    def _pass_on(self, number: int) -> None:
        for pid in ranks_below(self._child):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _recorded(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the wakeup descriptor has told the loop already."""


def _clear() -> None:
    """Nothing of the command is left; what can't be ended is named."""
    until = time.monotonic() + _END_WITHIN_S
    while kill_children():
        if time.monotonic() > until:
            _say(f"{what_is_left(children())} can't be ended")
            return
        time.sleep(0.005)


def _exit_as(status: int) -> NoReturn:
    """With the same status; srun tells of a signal only where one ended its task."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):
            _disable_own_core_dump()
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


def _disable_own_core_dump() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"slurm_forge: {text}\n".encode(errors="replace"))


def _parsed(arguments: Sequence[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    options, words = list(arguments), tuple[str, ...]()
    if "--" in options:
        at = options.index("--")
        options, words = options[:at], tuple(options[at + 1 :])
    passes: set[str] = set()
    wrong = [each for each in options if not each.startswith("--pass=")]
    for each in options:
        passes.update(each.partition("=")[2].split(","))
    signals = {each.name for each in SAVE_SIGNALS}
    if wrong or not words or not passes <= signals:
        raise ForgeError(
            f"the shield was started with {list(arguments)}",
            next_step="python -m slurm_forge.process shield [--pass=SIGTERM,SIGUSR1] -- COMMAND…",
        )
    return frozenset(passes), words


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """``[--pass=SIGNAL,…] -- COMMAND…``, in a step that slurm_forge has started."""
    variables = process_environ()
    try:
        passes, words = _parsed(sys.argv[1:] if argv is None else argv)
        environment = SlurmEnvironment.from_environ(variables)
        knobs = Knobs.from_environ(variables)
        shield = _Shield(passes)
        task_variables = variables_for(words, environment, variables, of_shield=not passes)
        shield.start(filled(words, environment, variables), task_variables)
    except ForgeError as error:
        _say(str(error))
        os._exit(1)
    reporter = None
    if knobs.shields is not None and environment is not None and environment.procid is not None:
        hello = AgentHello(
            rank=environment.procid,
            world=environment.ntasks or 1,
            host=environment.node_name or socket.gethostname(),
            pid=os.getpid(),
        )
        credentials = Credentials(knobs.shields_nonce, knobs.secret)
        reporter = SignalReporter(hello, knobs.shields, credentials)
    status = shield.watch(reporter)
    _clear()
    if reporter is not None:
        reporter.close()
    _exit_as(status)


if __name__ == "__main__":
    main()
