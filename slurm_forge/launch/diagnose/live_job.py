"""The process ``live_job FOLDER``: the batch step of ``doctor --live``.

Starts listeners in every way a rank may sit below Slurm, has signals sent to them, looks at the
nodes, and writes what was seen into the folder.  Signals are real: Slurm sends them, its warning
before the time limit too.  A second start of the job says only that it has come back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue

from pydantic import TypeAdapter, ValidationError

from slurm_forge.control.messages.live import ListenerEvent
from slurm_forge.errors import ForgeError, SlurmCommandError
from slurm_forge.files import write_atomic
from slurm_forge.knobs import process_environ
from slurm_forge.launch.command.signal_listener import (
    ListenerStep,
    sentinel_environment,
    small_step,
)
from slurm_forge.launch.diagnose.live_meeting import (
    AGAIN,
    HERE,
    NODE_LOCK,
    NODE_ONCE,
    REPORT,
    answer,
    is_over,
    read_card,
)
from slurm_forge.launch.diagnose.live_node import PREFIX, inspect_node, open_door
from slurm_forge.launch.diagnose.live_rounds import WORKERS, parse_event, sightings
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
from slurm_forge.slurm.process import run_command

_NODE = TypeAdapter(NodeSeen)
_STEP_NAME = "forge-live"
#: One step for each of them; the workers are forked by the task.
_STEPS = (Receiver.TASK, Receiver.TASK_PLAIN, Receiver.SHELL, Receiver.TORCHRUN)
#: How long listeners may take to be there: their interpreter comes from shared storage.
_STANDS_S = 40.0
#: How long to wait for what comes of a signal; and for a listener on a busy node.
_COLLECTS_S, _COLLECTS_AT_MOST_S = 2.5, 10.0
#: Beyond the moment at which Slurm's warning is due at the latest.
_WARNING_LATE_S = 5.0
#: With less than this left before the limit no other round is begun.
_ROOM_S = 25.0
_PEERS_S = 100.0


class _LiveStep(ListenerStep):
    """The step of one way: ``present`` is who has said that it is there, of ``size`` listeners."""

    def __init__(
        self,
        way: Receiver,
        command: Sequence[str],
        environment: Mapping[str, str],
        size: int,
        publish: Callable[[ListenerEvent], None],
    ) -> None:
        self.present: set[tuple[Receiver, str]] = set()
        self._way, self._size, self._publish = way, size, publish
        super().__init__(command, environment, self._on_line, self._on_end)
        if self._process is None:
            raise ForgeError(
                self.failed, next_step="Put Slurm's commands onto PATH, in setup: or site modules."
            )

    @property
    def complete(self) -> bool:
        return len(self.present) >= self._size

    def _on_line(self, line: str) -> None:
        event = parse_event(line)
        if event is None:
            return
        if event.what == "here":
            self.present.add((Receiver(event.way), event.host))
        self._publish(event)

    def _on_end(self) -> None:
        ended = ListenerEvent(way=self._way.value, host="", what="ended", at=time.time())
        self._publish(ended)


class _LiveJob:
    """One live look from inside."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, here: SlurmEnvironment) -> None:
        self._folder = folder
        self._options = arguments
        self._here = here
        self._queue: SimpleQueue[ListenerEvent] = SimpleQueue()
        #: What listeners and steps have said since the last round.
        self._events: list[ListenerEvent] = []
        self._variables = dict(process_environ())
        self._slurm = SubprocessSlurm.of_this_process().with_timeout(timedelta(seconds=10))
        self._host = node_name(self._variables)
        self._nonce = read_card(folder)
        self._started = time.time()
        self._steps: dict[Receiver, _LiveStep] = {}
        self._rounds: list[SignalRound] = []
        self._nodes: list[NodeSeen] = []
        self._end: float | None = None
        self._torch_left_out = ""

    def run(self) -> int:
        # First of all: the batch step listens, too.
        SignalWatcher(lambda number: self._batch_saw(number.name))
        threading.Thread(target=self._answer, name="forge-live-answer", daemon=True).start()
        with exclusive(self._folder / NODE_LOCK, timedelta(0)):
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

    def _answer(self) -> None:
        answer(self._folder)
        # SIGTERM is only looked at here: without this a cancelled job would stay until SIGKILL.
        os._exit(0)

    # --- listeners --------------------------------------------------------------------------------

    def _expected_receivers(self) -> set[tuple[Receiver, str]]:
        task = self._steps.get(Receiver.TASK)
        hosts = {host for way, host in task.present if way is Receiver.TASK} if task else set()
        everywhere = (Receiver.TASK, *WORKERS)
        receivers = {(way, host) for way in everywhere for host in {*hosts, self._host}}
        return receivers | {(way, self._host) for way in Receiver if way not in everywhere}

    def _present(self) -> set[tuple[Receiver, str]]:
        there = (step.present for step in self._steps.values() if step.runs)
        return {(Receiver.BATCH, self._host)}.union(*there)

    def _stand(self, *, forget: bool = True) -> None:
        """Start those that are not there, and wait until they say that they are."""
        worker_died = any(each.what == "died" for each in self._events)
        for way in _STEPS:
            step = self._steps.get(way)
            if step is not None:
                if step.runs and not (way is Receiver.TASK and worker_died):
                    continue
                step.close()
            self._steps[way] = self._start(way)
        until = time.monotonic() + min(_STANDS_S, max(1.0, self._remaining_s() - _ROOM_S))
        while time.monotonic() < until:
            if all(step.complete or not step.runs for step in self._steps.values()):
                break
            self._take(0.05)
        if forget:
            self._take(0.0)
            self._events.clear()

    def _start(self, way: Receiver) -> _LiveStep:
        task = way is Receiver.TASK
        nodes = max(1, len(self._here.nodes)) if task else 1
        command = small_step(
            payload_of(way, sys.executable),
            nodes=nodes,
            on=None if task else self._here.node_name,
            name=_STEP_NAME,
            options=self._options.srun_option,
        )
        size = nodes * (1 + len(WORKERS) if task else 1)
        environment = sentinel_environment(self._variables)
        return _LiveStep(way, command, environment, size, self._queue.put)

    def _take(self, wait_s: float) -> None:
        with contextlib.suppress(Empty):
            self._events.append(self._queue.get(timeout=wait_s))
            while True:
                self._events.append(self._queue.get_nowait())

    def _batch_saw(self, name: str) -> None:
        way = Receiver.BATCH.value
        event = ListenerEvent(way=way, host=self._host, what="saw", signal=name, at=time.time())
        self._queue.put(event)

    # --- rounds -----------------------------------------------------------------------------------

    def _wait_for_warning(self) -> None:
        """Slurm's own warning: nobody calls for it, and it comes when Slurm has looked."""
        kind, signal = RoundKind.WARNING, "SIGUSR2"
        if self._end is None:
            self._add(SignalRound(kind=kind, signal=signal, problem="the job's end is not known"))
            return
        before, asked_s = self._present(), float(self._options.warned)
        latest = self._end - asked_s + _WARNING_LATE_S
        while time.time() < latest and self._first() is None:
            self._take(0.2)
        self._collect(before, Receiver.TASK)
        came = self._first()
        self._add(
            SignalRound(
                kind=kind,
                signal=signal,
                sightings=self._sightings(before, signal, None),
                before_end_s=None if came is None else self._end - came,
                asked_s=asked_s,
                problem="" if came is not None else "it has not come",
            )
        )

    def _first(self) -> float | None:
        """When anybody has felt a signal since the last round."""
        return min((e.at for e in self._events if e.what in ("saw", "died")), default=None)

    def _send_all(self) -> None:
        for kind, name, batch in (
            (RoundKind.STEPS_USER, "USR2", False),
            (RoundKind.STEPS_TERM, "TERM", False),
            (RoundKind.BATCH_USER, "USR2", True),
        ):
            signal, problem = f"SIG{name}", ""
            if self._remaining_s() < _ROOM_S:
                self._add(SignalRound(kind=kind, signal=signal, problem="no time was left for it"))
                continue
            self._stand()
            before, sent_at = self._present(), time.time()
            try:
                self._slurm.cancel(self._here.job_ref, signal=name, batch=batch)
            except SlurmCommandError as error:
                problem = error.message
            answered_s = time.time() - sent_at
            self._collect(before, Receiver.BATCH if batch else Receiver.TASK)
            self._add(
                SignalRound(
                    kind=kind,
                    signal=signal,
                    sightings=self._sightings(before, signal, sent_at),
                    sent_at=sent_at,
                    answered_s=answered_s,
                    problem=problem,
                )
            )

    def _collect(self, before: set[tuple[Receiver, str]], way: Receiver) -> None:
        """Take what is said for a while, and for longer while a listener of ``way`` is silent."""
        listeners = {each for each in before if each[0] is way}
        began = time.monotonic()
        while (waited := time.monotonic() - began) < _COLLECTS_AT_MOST_S:
            self._take(0.1)
            if waited >= _COLLECTS_S and listeners <= self._reached():
                break

    def _reached(self) -> set[tuple[Receiver, str]]:
        felt = [each for each in self._events if each.what in ("saw", "died")]
        return {(Receiver(each.way), each.host) for each in felt}

    def _sightings(
        self, before: set[tuple[Receiver, str]], signal: str, sent_at: float | None
    ) -> tuple[Sighting, ...]:
        expected = self._expected_receivers()
        return sightings(before, self._events, expected=expected, signal=signal, sent_at=sent_at)

    def _add(self, round_: SignalRound) -> None:
        self._rounds.append(round_)
        self._report(complete=False)

    # --- nodes ------------------------------------------------------------------------------------

    def _look_here(self, nodes: list[NodeSeen]) -> None:
        nodes.append(inspect_node(self._folder, environ=self._variables))

    def _peers(self) -> list[NodeSeen]:
        """The other nodes look by themselves, and knock at this one."""
        others = [name for name in self._here.nodes if name != self._here.node_name]
        if not others:
            return []
        patience = timedelta(seconds=min(_PEERS_S, max(5.0, self._remaining_s() - 10.0)))
        with open_door(self._nonce) as addresses:
            words = process_words("live_node", str(self._folder), addresses)
            command = small_step(
                (sys.executable, *words),
                nodes=len(others),
                on=",".join(others),
                name=_STEP_NAME,
                options=self._options.srun_option,
            )
            done = run_command(command, patience, sentinel_environment(self._variables))
        nodes = []
        for line in done.stdout.splitlines():
            if line.startswith(PREFIX):
                with contextlib.suppress(ValidationError):
                    nodes.append(_NODE.validate_json(line[len(PREFIX) :]))
        return nodes

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


def payload_of(way: Receiver, python: str) -> tuple[str, ...]:
    """The command of one task that listens in this way."""
    listener = process_words("live_rank", way.value)
    rank = (python, "-u", *listener)
    match way:
        case Receiver.TASK:
            return (*rank, "--workers", *(each.value for each in WORKERS))
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


def main(argv: Sequence[str] | None = None) -> int:
    """The batch step; 0 where the report was written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--warned", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
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
        if arguments.requeue and not is_over(arguments.folder):
            reply = SubprocessSlurm.of_this_process().requeue(here.job_ref)
            sys.stderr.write(f"slurm_forge: requeue: {reply.outcome.value} {reply.stderr}\n")
        return status
    except (ForgeError, OSError) as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
