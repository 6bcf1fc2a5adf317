"""The process ``live_job FOLDER``: the batch step of ``doctor --live``.

Starts listeners in every way a rank may sit below Slurm, has signals sent to them, looks at the
nodes, and writes what was seen into the folder.  Signals are real: Slurm sends them, its warning
before the time limit too.  A second start of the job says only that it has come back.

The listeners of ``doctor --live``: one step for each way a rank may sit below Slurm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue

from pydantic import TypeAdapter, ValidationError

from slurm_forge.control.messages.live import ListenerEvent, parse_event
from slurm_forge.errors import ForgeError, SlurmCommandError
from slurm_forge.files import write_atomic
from slurm_forge.knobs import process_environ
from slurm_forge.launch.command.signal_listener import sentinel_environment
from slurm_forge.launch.diagnose.live_meeting import (
    Answering,
    Door,
)
from slurm_forge.launch.diagnose.live_node import (
    PREFIX,
    inspect_node,
    read_card,
)
from slurm_forge.launch.diagnose.live_rounds import (
    StepEnded,
    sightings,
)
from slurm_forge.lock import exclusive
from slurm_forge.process import process_words
from slurm_forge.recovery.live_observations import (
    JobSeen,
    NodeSeen,
    Receiver,
    RoundKind,
    Sighting,
    SignalRound,
)
from slurm_forge.signals import SignalWatcher
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment, node_name

#: Files that the job leaves for the login node.
HERE, REPORT, AGAIN, NODE_ONCE, NODE_LOCK = "here", "report", "again", "node-once", "node.lock"
#: What the login node leaves for the job: it is cancelled next, and must not come back.
OVER = "over"

_NODE = TypeAdapter(NodeSeen)
#: How long listeners may take to be there: their interpreter comes from shared storage.
_STANDS_S = 40.0
#: How long after a signal is waited for what comes of it.
_COLLECTS_S = 2.5
#: Beyond the moment at which Slurm's warning is due at the latest.
_WARNING_LATE_S = 5.0
#: With less than this left before the limit no other round is begun.
_ROOM_S = 25.0
_PEERS_S = 100.0
#: How often it is looked whether the login node has given up.
_LOOKS_S = 0.5


@dataclass
class _LiveEvents:
    """What listeners and steps have reported so far."""

    queue: SimpleQueue[ListenerEvent | StepEnded] = field(default_factory=SimpleQueue)
    reports: list[ListenerEvent] = field(default_factory=list)
    ended: list[StepEnded] = field(default_factory=list)

    def take(self, wait_s: float) -> None:
        with contextlib.suppress(Empty):
            each = self.queue.get(timeout=wait_s)
            while True:
                (self.ended if isinstance(each, StepEnded) else self.reports).append(each)  # type: ignore[arg-type]
                each = self.queue.get_nowait()

    def forget(self) -> None:
        self.take(0.0)
        self.reports.clear()
        self.ended.clear()


class _LiveJob:
    """One live look from inside."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, here: SlurmEnvironment) -> None:
        self._folder = folder
        self._options = arguments
        self._here = here
        self._events = _LiveEvents()
        self._variables = dict(process_environ())
        self._slurm = SubprocessSlurm.of_this_process().with_timeout(timedelta(seconds=10))
        self._host = node_name(self._variables)
        self._nonce = read_card(folder)
        self._started = time.time()
        self._steps: dict[Receiver, LiveStep] = {}
        self._rounds: list[SignalRound] = []
        self._nodes: list[NodeSeen] = []
        self._end: float | None = None
        self._torch_left_out = ""

    def run(self) -> int:
        # First of all: the batch step listens, too.
        SignalWatcher(lambda number: self._batch_saw(number.name))
        threading.Thread(target=self._leave_when_over, name="forge-live-over", daemon=True).start()
        with Answering(self._folder), exclusive(self._folder / NODE_LOCK, timedelta(0)):
            (self._folder / NODE_ONCE).touch()
            self._write(HERE, {"host": self._host, "at": self._started})
            own: list[NodeSeen] = []
            looking = threading.Thread(target=self._look_here, args=(own,), daemon=True)
            looking.start()
            self._end = self._known_end()
            self._stand(forget=False)  # the warning may have come already
            if not self._options.quick:
                self._wait_for_warning()
            self._send_all()
            looking.join(timeout=max(1.0, self._remaining_s() - _ROOM_S))
            if own and own[0].torch is None:
                self._torch_left_out = "torch can't be imported by this Python on the node"
            self._nodes[:] = [*own, *self._peers()]
            for step in self._steps.values():
                step.close()
            self._report(complete=True)
        return 0

    def _leave_when_over(self) -> None:
        # SIGTERM is only looked at here: without this a cancelled job would stay until SIGKILL.
        while not _is_over(self._folder):
            time.sleep(_LOOKS_S)
        os._exit(0)

    # --- listeners --------------------------------------------------------------------------------

    def _ways(self) -> tuple[Receiver, ...]:
        ways = [Receiver.TASK, Receiver.TASK_PLAIN, Receiver.SHELL]
        return (*ways, Receiver.TORCHRUN) if self._options.torch else tuple(ways)

    def _expected_receivers(self) -> set[tuple[Receiver, str]]:
        hosts = self._hosts()
        receivers = {(Receiver.BATCH, self._host)}
        for way in (Receiver.TASK, Receiver.WORKER, Receiver.WORKER_PLAIN):
            receivers |= {(way, host) for host in hosts}
        receivers |= {(way, self._host) for way in self._ways() if way is not Receiver.TASK}
        return receivers

    def _hosts(self) -> set[str]:
        step = self._steps.get(Receiver.TASK)
        there = {host for way, host in step.present if way is Receiver.TASK} if step else set()
        return there | {self._host}

    def _present(self) -> set[tuple[Receiver, str]]:
        receivers = {(Receiver.BATCH, self._host)}
        for step in self._steps.values():
            if step.alive:
                receivers |= step.present
        return receivers

    def _stand(self, *, forget: bool = True) -> None:
        """Start those that are not there, and wait until they say that they are."""
        told_dead = {each.way for each in self._events.reports if each.what == "died"}
        for way in self._ways():
            step = self._steps.get(way)
            lost = way is Receiver.TASK and told_dead
            if step is not None and step.alive and not lost:
                continue
            if step is not None:
                step.close()
            many = len(self._here.nodes) if way is Receiver.TASK else 1
            command = srun_words(
                payload_of(way, sys.executable),
                nodes=max(1, many),
                on=None if way is Receiver.TASK else self._here.node_name,
                options=self._options.srun_option,
            )
            environment = sentinel_environment(self._variables)
            self._steps[way] = LiveStep(way, command, environment, self._events.queue.put)
        until = time.monotonic() + min(_STANDS_S, max(1.0, self._remaining_s() - _ROOM_S))
        while time.monotonic() < until and not self._all_stand():
            self._events.take(0.05)
        if forget:
            self._events.forget()

    def _all_stand(self) -> bool:
        for way, step in self._steps.items():
            names = {way} | (
                {Receiver.WORKER, Receiver.WORKER_PLAIN} if way is Receiver.TASK else set()
            )
            many = len(self._here.nodes) if way is Receiver.TASK else 1
            if step.alive and len([1 for w, _ in step.present if w in names]) < many * len(names):
                return False
        return True

    def _batch_saw(self, name: str) -> None:
        event = ListenerEvent(
            way=Receiver.BATCH.value, host=self._host, what="saw", signal=name, at=time.time()
        )
        self._events.queue.put(event)

    # --- rounds -----------------------------------------------------------------------------------

    def _wait_for_warning(self) -> None:
        """Slurm's own warning: nobody calls for it, and it comes when Slurm has looked."""
        expected_s = float(self._options.warned)
        kind, signal = RoundKind.WARNING, "SIGUSR2"
        if self._end is None:
            self._add(SignalRound(kind=kind, signal=signal, problem="the job's end is not known"))
            return
        before = self._present()
        latest = self._end - expected_s + _WARNING_LATE_S
        while time.time() < latest and self._first() is None:
            self._events.take(0.2)
        self._collect()
        came = self._first()
        problem = "" if came is not None else "it did not arrive"
        early = None if came is None else self._end - came
        sightings = self._sightings(before, signal, None)
        self._add(
            SignalRound(
                kind=kind,
                signal=signal,
                sightings=sightings,
                before_end_s=early,
                asked_s=expected_s,
                problem=problem,
            )
        )

    def _first(self) -> float | None:
        """When anybody has felt a signal since the reports were last cleared."""
        return min((each.at for each in self._events.reports if each.what != "here"), default=None)

    def _send_all(self) -> None:
        for kind, name, batch in (
            (RoundKind.STEPS_USER, "USR2", False),
            (RoundKind.STEPS_TERM, "TERM", False),
            (RoundKind.BATCH_USER, "USR2", True),
        ):
            if self._remaining_s() < _ROOM_S:
                self._add(
                    SignalRound(kind=kind, signal=f"SIG{name}", problem="no time was left for it")
                )
                continue
            self._stand()
            before, sent_at = self._present(), time.time()
            problem = ""
            try:
                self._slurm.cancel(self._here.job_ref, signal=name, batch=batch)
            except SlurmCommandError as error:
                problem = error.message
            answered = time.time() - sent_at
            self._collect()
            sightings = self._sightings(before, f"SIG{name}", sent_at)
            self._add(
                SignalRound(
                    kind=kind,
                    signal=f"SIG{name}",
                    sightings=sightings,
                    sent_at=sent_at,
                    answered_s=answered,
                    problem=problem,
                )
            )

    def _collect(self) -> None:
        until = time.monotonic() + _COLLECTS_S
        while time.monotonic() < until:
            self._events.take(0.1)

    def _sightings(
        self, before: set[tuple[Receiver, str]], signal: str, sent_at: float | None
    ) -> tuple[Sighting, ...]:
        return sightings(
            before,
            tuple(self._events.reports),
            tuple(self._events.ended),
            expected=self._expected_receivers(),
            workers_of=Receiver.TASK,
            signal=signal,
            sent_at=sent_at,
        )

    def _add(self, round_: SignalRound) -> None:
        self._rounds.append(round_)
        self._report(complete=False)

    # --- nodes ------------------------------------------------------------------------------------

    def _look_here(self, nodes: list[NodeSeen]) -> None:
        nodes.append(inspect_node(self._folder, environ=self._variables))

    def _peers(self) -> list[NodeSeen]:
        """The other nodes look by themselves, and knock at this one."""
        others = len(self._here.nodes) - 1
        if others < 1:
            return []
        with Door(self._nonce) as door:
            payload = (
                sys.executable,
                *process_words("live_node", str(self._folder), door.addresses),
            )
            names = ",".join(n for n in self._here.nodes if n != self._here.node_name)
            command = srun_words(payload, nodes=others, on=names, options=self._options.srun_option)
            try:
                result = subprocess.run(
                    command,
                    env=sentinel_environment(self._variables),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=min(_PEERS_S, max(5.0, self._remaining_s() - 10.0)),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return []
        addresses = []
        for line in result.stdout.splitlines():
            if line.startswith(PREFIX):
                with contextlib.suppress(ValidationError):
                    addresses.append(_NODE.validate_json(line[len(PREFIX) :]))
        return addresses

    # --- telling ----------------------------------------------------------------------------------

    def _known_end(self) -> float | None:
        try:
            record = self._slurm.show_job(self._here.job_ref)
        except SlurmCommandError:
            record = None
        end = self._here.end_time if record is None else record.end_time
        return None if end is None else end.timestamp()

    def _remaining_s(self) -> float:
        return 3600.0 if self._end is None else self._end - time.time()

    def _report(self, *, complete: bool) -> None:
        report = JobSeen(
            nonce=self._nonce,
            job=self._here.job_ref,
            host=self._host,
            started_at=self._started,
            ended_at=time.time(),
            end_time=self._end,
            rounds=tuple(self._rounds),
            nodes=tuple(self._nodes),
            torch_left_out=self._torch_left_out,
            complete=complete,
        )
        self._write(REPORT, asdict(report))

    def _write(self, name: str, content: object) -> None:
        write_atomic(self._folder / name, json.dumps(content).encode())


def _is_over(folder: Path) -> bool:
    """Whether the login node wants no more of this: it says so, and removes the folder."""
    return (folder / OVER).exists() or not folder.is_dir()


def main(argv: Sequence[str] | None = None) -> int:
    """The batch step; 0 where the report was written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--warned", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("--srun-option", action="append", default=[])
    arguments = parser.parse_args(argv)
    try:
        here = SlurmEnvironment.from_environ(process_environ())
        if here is None:
            raise ForgeError(
                "this is the job of doctor --live", next_step="Use slurm-forge doctor --live."
            )
        if here.restart_count:
            write_atomic(arguments.folder / AGAIN, json.dumps({"at": time.time()}).encode())
            return 0
        status = _LiveJob(arguments.folder, arguments, here).run()
        if arguments.requeue and not _is_over(arguments.folder):
            reply = SubprocessSlurm.of_this_process().requeue(here.job_ref)
            sys.stderr.write(f"slurm_forge: requeue: {reply.outcome.value} {reply.stderr}\n")
        return status
    except (ForgeError, OSError) as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())

_TAIL_LINES = 8


def payload_of(way: Receiver, python: str) -> tuple[str, ...]:
    """The command of one task that listens in this way."""
    listener = process_words("live_rank", way.value)
    rank = (python, "-u", *listener)
    match way:
        case Receiver.TASK:
            return (
                *rank,
                "--workers",
                Receiver.WORKER.value,
                Receiver.WORKER_PLAIN.value,
            )
        case Receiver.TASK_PLAIN:
            return (*rank, "--plain")
        case Receiver.SHELL:
            # With something behind it the shell stays, as where a script starts the training.
            return ("bash", "-c", f"{shlex.join(rank)}; exit $?")
        case Receiver.TORCHRUN:
            options = ("--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
            return (python, "-m", "torch.distributed.run", *options, *listener)
        case _:
            raise ValueError(f"{way.value} is no step of its own")


def srun_words(
    payload: Sequence[str], *, nodes: int, on: str | None, options: Sequence[str] = ()
) -> tuple[str, ...]:
    """A small step that shares everything with the others (``--overlap``: 20.11 and later)."""
    where = () if on is None else (f"--nodelist={on}",)
    small = ("--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0", "--unbuffered")
    size = (f"--nodes={nodes}", f"--ntasks={nodes}")
    return ("srun", "--overlap", *size, *small, *where, "--job-name=forge-live", *options, *payload)


class LiveStep:
    """One step whose listeners are heard through a pipe; ``tell`` gets what happens, from a thread.

    ``present`` is who has said that it is there.
    """

    def __init__(
        self,
        way: Receiver,
        command: Sequence[str],
        environment: Mapping[str, str],
        tell: Callable[[ListenerEvent | StepEnded], None],
    ) -> None:
        self.way = way
        self.present: set[tuple[Receiver, str]] = set()
        self._publish = tell
        self._output_lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._thread = threading.Thread(target=self._read, name="forge-live", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its srun still runs."""
        return self._process.poll() is None

    @property
    def words(self) -> str:
        """The end of what it has printed beside the listeners' lines."""
        return " ".join(" ".join(self._output_lines).split())

    def close(self, patience_s: float = 1.0) -> None:
        """End it: its listeners go with their input."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None  # noqa: S101  asked for above
        with contextlib.suppress(OSError, ValueError):
            for line in stream:
                event = parse_event(line)
                if event is None:
                    self._output_lines.append(line)
                    continue
                if event.what == "here":
                    self.present.add((Receiver(event.way), event.host))
                self._publish(event)
        self._publish(StepEnded(self.way, time.time()))
