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

from slurm_forge.control.messages.live import (
    Told,
    hear,
)
from slurm_forge.errors import ForgeError, SlurmCommandError
from slurm_forge.files import write_atomic
from slurm_forge.launch.command.signal_listener import sentinel_environment
from slurm_forge.launch.diagnose.live_meeting import (
    Answering,
    Door,
)
from slurm_forge.launch.diagnose.live_node import (
    PREFIX,
    look,
    read_card,
)
from slurm_forge.launch.diagnose.live_rounds import (
    Ended,
    sightings,
)
from slurm_forge.lock import exclusive
from slurm_forge.process import process_words
from slurm_forge.recovery.live_observations import (
    JobSeen,
    NodeSeen,
    Round,
    RoundKind,
    Sighting,
    Way,
)
from slurm_forge.signals import SignalWatcher
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment, node_name, process_environ

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
class _Heard:
    """What listeners and steps have told so far."""

    events: SimpleQueue[Told | Ended] = field(default_factory=SimpleQueue)
    told: list[Told] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def take(self, wait_s: float) -> None:
        with contextlib.suppress(Empty):
            each = self.events.get(timeout=wait_s)
            while True:
                (self.ended if isinstance(each, Ended) else self.told).append(each)  # type: ignore[arg-type]
                each = self.events.get_nowait()

    def forget(self) -> None:
        self.take(0.0)
        self.told.clear()
        self.ended.clear()


class _Job:
    """One live look from inside."""

    def __init__(self, folder: Path, given: argparse.Namespace, here: SlurmEnvironment) -> None:
        self._folder = folder
        self._given = given
        self._here = here
        self._heard = _Heard()
        self._variables = dict(process_environ())
        self._slurm = SubprocessSlurm.of_this_process().with_timeout(timedelta(seconds=10))
        self._host = node_name(self._variables)
        self._nonce = read_card(folder)
        self._started = time.time()
        self._steps: dict[Way, LiveStep] = {}
        self._rounds: list[Round] = []
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
            if not self._given.quick:
                self._wait_for_warning()
            self._send_all()
            looking.join(timeout=max(1.0, self._left() - _ROOM_S))
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

    def _ways(self) -> tuple[Way, ...]:
        ways = [Way.TASK, Way.TASK_PLAIN, Way.SHELL]
        return (*ways, Way.TORCHRUN) if self._given.torch else tuple(ways)

    def _wanted(self) -> set[tuple[Way, str]]:
        hosts = self._hosts()
        found = {(Way.BATCH, self._host)}
        for way in (Way.TASK, Way.WORKER, Way.WORKER_PLAIN):
            found |= {(way, host) for host in hosts}
        found |= {(way, self._host) for way in self._ways() if way is not Way.TASK}
        return found

    def _hosts(self) -> set[str]:
        step = self._steps.get(Way.TASK)
        there = {host for way, host in step.present if way is Way.TASK} if step else set()
        return there | {self._host}

    def _present(self) -> set[tuple[Way, str]]:
        found = {(Way.BATCH, self._host)}
        for step in self._steps.values():
            if step.alive:
                found |= step.present
        return found

    def _stand(self, *, forget: bool = True) -> None:
        """Start those that are not there, and wait until they say that they are."""
        told_dead = {each.way for each in self._heard.told if each.what == "died"}
        for way in self._ways():
            step = self._steps.get(way)
            lost = way is Way.TASK and told_dead
            if step is not None and step.alive and not lost:
                continue
            if step is not None:
                step.close()
            many = len(self._here.nodes) if way is Way.TASK else 1
            command = srun_words(
                payload_of(way, sys.executable),
                nodes=max(1, many),
                on=None if way is Way.TASK else self._here.node_name,
                options=self._given.srun_option,
            )
            environment = sentinel_environment(self._variables)
            self._steps[way] = LiveStep(way, command, environment, self._heard.events.put)
        until = time.monotonic() + min(_STANDS_S, max(1.0, self._left() - _ROOM_S))
        while time.monotonic() < until and not self._all_stand():
            self._heard.take(0.05)
        if forget:
            self._heard.forget()

    def _all_stand(self) -> bool:
        for way, step in self._steps.items():
            names = {way} | ({Way.WORKER, Way.WORKER_PLAIN} if way is Way.TASK else set())
            many = len(self._here.nodes) if way is Way.TASK else 1
            if step.alive and len([1 for w, _ in step.present if w in names]) < many * len(names):
                return False
        return True

    def _batch_saw(self, name: str) -> None:
        told = Told(way=Way.BATCH.value, host=self._host, what="saw", signal=name, at=time.time())
        self._heard.events.put(told)

    # --- rounds -----------------------------------------------------------------------------------

    def _wait_for_warning(self) -> None:
        """Slurm's own warning: nobody calls for it, and it comes when Slurm has looked."""
        asked = float(self._given.warned)
        kind, signal = RoundKind.WARNING, "SIGUSR2"
        if self._end is None:
            self._add(Round(kind=kind, signal=signal, problem="the job's end is not known"))
            return
        before = self._present()
        latest = self._end - asked + _WARNING_LATE_S
        while time.time() < latest and self._first() is None:
            self._heard.take(0.2)
        self._collect()
        came = self._first()
        problem = "" if came is not None else "it has not come"
        early = None if came is None else self._end - came
        seen = self._seen(before, signal, None)
        self._add(
            Round(
                kind=kind,
                signal=signal,
                sightings=seen,
                before_end_s=early,
                asked_s=asked,
                problem=problem,
            )
        )

    def _first(self) -> float | None:
        """When anybody has felt a signal since what was told was last forgotten."""
        return min((each.at for each in self._heard.told if each.what != "here"), default=None)

    def _send_all(self) -> None:
        for kind, name, batch in (
            (RoundKind.STEPS_USER, "USR2", False),
            (RoundKind.STEPS_TERM, "TERM", False),
            (RoundKind.BATCH_USER, "USR2", True),
        ):
            if self._left() < _ROOM_S:
                self._add(Round(kind=kind, signal=f"SIG{name}", problem="no time was left for it"))
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
            seen = self._seen(before, f"SIG{name}", sent_at)
            self._add(
                Round(
                    kind=kind,
                    signal=f"SIG{name}",
                    sightings=seen,
                    sent_at=sent_at,
                    answered_s=answered,
                    problem=problem,
                )
            )

    def _collect(self) -> None:
        until = time.monotonic() + _COLLECTS_S
        while time.monotonic() < until:
            self._heard.take(0.1)

    def _seen(
        self, before: set[tuple[Way, str]], signal: str, sent_at: float | None
    ) -> tuple[Sighting, ...]:
        return sightings(
            before,
            tuple(self._heard.told),
            tuple(self._heard.ended),
            wanted=self._wanted(),
            workers_of=Way.TASK,
            signal=signal,
            sent_at=sent_at,
        )

    def _add(self, done: Round) -> None:
        self._rounds.append(done)
        self._report(complete=False)

    # --- nodes ------------------------------------------------------------------------------------

    def _look_here(self, found: list[NodeSeen]) -> None:
        found.append(look(self._folder, environ=self._variables))

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
            command = srun_words(payload, nodes=others, on=names, options=self._given.srun_option)
            try:
                done = subprocess.run(
                    command,
                    env=sentinel_environment(self._variables),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=min(_PEERS_S, max(5.0, self._left() - 10.0)),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return []
        found = []
        for line in done.stdout.splitlines():
            if line.startswith(PREFIX):
                with contextlib.suppress(ValidationError):
                    found.append(_NODE.validate_json(line[len(PREFIX) :]))
        return found

    # --- telling ----------------------------------------------------------------------------------

    def _known_end(self) -> float | None:
        try:
            record = self._slurm.show_job(self._here.job_ref)
        except SlurmCommandError:
            record = None
        end = self._here.end_time if record is None else record.end_time
        return None if end is None else end.timestamp()

    def _left(self) -> float:
        return 3600.0 if self._end is None else self._end - time.time()

    def _report(self, *, complete: bool) -> None:
        seen = JobSeen(
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
        self._write(REPORT, asdict(seen))

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
    given = parser.parse_args(argv)
    try:
        here = SlurmEnvironment.from_environ(process_environ())
        if here is None:
            raise ForgeError(
                "this is the job of doctor --live", next_step="Use slurm-forge doctor --live."
            )
        if here.restart_count:
            write_atomic(given.folder / AGAIN, json.dumps({"at": time.time()}).encode())
            return 0
        status = _Job(given.folder, given, here).run()
        if given.requeue and not _is_over(given.folder):
            reply = SubprocessSlurm.of_this_process().requeue(here.job_ref)
            sys.stderr.write(f"slurm_forge: requeue: {reply.outcome.value} {reply.stderr}\n")
        return status
    except (ForgeError, OSError) as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())

_TAIL_LINES = 8


def payload_of(way: Way, python: str) -> tuple[str, ...]:
    """The command of one task that listens in this way."""
    listener = process_words("live_rank", way.value)
    rank = (python, "-u", *listener)
    match way:
        case Way.TASK:
            return (*rank, "--workers", Way.WORKER.value, Way.WORKER_PLAIN.value)
        case Way.TASK_PLAIN:
            return (*rank, "--plain")
        case Way.SHELL:
            # With something behind it the shell stays, as where a script starts the training.
            return ("bash", "-c", f"{shlex.join(rank)}; exit $?")
        case Way.TORCHRUN:
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
        way: Way,
        command: Sequence[str],
        environment: Mapping[str, str],
        tell: Callable[[Told | Ended], None],
    ) -> None:
        self.way = way
        self.present: set[tuple[Way, str]] = set()
        self._tell = tell
        self._said: deque[str] = deque(maxlen=_TAIL_LINES)
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
        return " ".join(" ".join(self._said).split())

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
                told = hear(line)
                if told is None:
                    self._said.append(line)
                    continue
                if told.what == "here":
                    self.present.add((Way(told.way), told.host))
                self._tell(told)
        self._tell(Ended(self.way, time.time()))
