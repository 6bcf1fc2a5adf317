"""The conductor inside rank 0's process: for stock submitit executors, which have no supervisor.

Same hub, same decisions.  What needs the batch step is missing: nobody outlives rank 0, and ranks
are not started again inside the allocation, so every cure is a requeue.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurm_forge.control import Hub
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.handshake import Credentials, is_hub_at
from slurm_forge.control.interfaces import preferred_address
from slurm_forge.errors import FencedError, RunDirectoryError
from slurm_forge.files import read_json, write_atomic
from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.launch.attempt.attempt import (
    REQUEUEING,
    TAKEN_OVER,
    Attempt,
)
from slurm_forge.launch.attempt.attempt_loop import AttemptLoop, FrontEnd, Requeuer
from slurm_forge.launch.attempt.lifeline import Lifeline
from slurm_forge.launch.attempt.requeuer import SlurmRequeuer, make_job_requeuer
from slurm_forge.launch.attempt.stop_between_attempts import stopped_before_start
from slurm_forge.launch.attempt.stop_explanation import StopExplanation
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.render.schedule import (
    planned_end,
    timing,
)
from slurm_forge.launch.requeue.requeue import RequeueOutcome, RequeueResult
from slurm_forge.recovery import LaunchFacts
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Decision

_LIMIT = 1 << 16
_ANSWER_S = 2.0
#: How long ranks that were told to leave may take.
_LEAVE_S = 3.0
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank 0 of this attempt hosts the control channel; without any when it refuses."""

    channel: str = ""
    credentials: Credentials = field(default_factory=lambda: Credentials("", ""))
    attempt: int = 0

    def publish(self, run: RunDirectory, key: str) -> None:
        """Write it for the other ranks; readable by the user alone, because of the secret."""
        body = {"channel": self.channel, **asdict(self.credentials), "attempt": self.attempt}
        write_atomic(run.rendezvous(key), json.dumps(body).encode())

    @classmethod
    def read(cls, run: RunDirectory, key: str) -> Rendezvous | None:
        """What was published; None where nothing is there that can be used."""
        try:
            body = read_json(run.rendezvous(key), _LIMIT)
            credentials = Credentials(str(body["nonce"]), str(body["secret"]))
            return cls(str(body["channel"]), credentials, int(body["attempt"]))
        except (OSError, RunDirectoryError, KeyError, ValueError, TypeError):
            return None

    def is_alive(self) -> bool:
        """Whether that hub answers: the file may be left by an older attempt."""
        hosts, port = parse_addresses(self.channel)
        return is_hub_at(hosts, port, self.credentials, _ANSWER_S)


def withdraw(run: RunDirectory, key: str) -> None:
    """Remove the file, so that the next attempt under the same key isn't misled."""
    run.rendezvous(key).unlink(missing_ok=True)


def await_rendezvous(
    run: RunDirectory,
    key: str,
    *,
    unwanted: Callable[[], bool] = lambda: False,
    wait_s: float = 120.0,
) -> Rendezvous | None:
    """What rank 0 published, once it is alive; None once the run is done, or ``unwanted``."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if unwanted():
            return None
        rendezvous = Rendezvous.read(run, key)
        if rendezvous is not None and not rendezvous.channel:
            return None
        if rendezvous is not None and rendezvous.is_alive():
            return rendezvous
        time.sleep(0.05)
    raise RunDirectoryError(
        f"rank 0 did not publish its address within {wait_s:.0f} s ({run.rendezvous(key)})",
        next_step="Check the log of rank 0; is the run directory on storage that all nodes see?",
    )


class EmbeddedConductor(FrontEnd):
    """Conducts from a thread of rank 0; ``exit_code`` decides how this process then ends."""

    def __init__(
        self,
        attempt: Attempt,
        *,
        world_size: int,
        job: str,
        slurm: Slurm | None,
        environment: SlurmEnvironment | None,
        requeue_exit_code: int | None,
        leave: Callable[[int], None] | None = None,
        lifeline: Lifeline | None = None,
        ear: Callable[[Callable[[str, str], None]], None] | None = None,
    ) -> None:
        self._attempt = attempt
        self._slurm = slurm
        self._requeue_exit_code = requeue_exit_code
        self._exit = leave or os._exit
        self._lifeline = lifeline
        #: Receives the conductor's ``add_signal``, for signals that reach none of the ranks.
        self._listen = ear
        file = attempt.file
        self.hub = Hub(
            world_size=world_size,
            interface_address=preferred_address(file.socket_interface, file.host_suffix),
        )
        self._job_poller = JobPoller(slurm, job)
        self._loop = AttemptLoop(
            attempt, self, self._requeuer(job, environment), self._job_poller, slurm=slurm, job=job
        )
        self._thread = threading.Thread(target=self._conduct, name="forge-conductor", daemon=True)
        self._over = threading.Event()
        #: Why the attempt ended, for the user; set once it is over (and this process still lives).
        self.reason = ""
        self.finished = False
        self.code = 0

    def _requeuer(self, job: str, environment: SlurmEnvironment | None) -> Requeuer:
        attempt, slurm = self._attempt, self._slurm
        if slurm is None:
            return _RestartedTasks(self)
        return SlurmRequeuer(
            attempt,
            make_job_requeuer(attempt, slurm, job=job, explain=StopExplanation(slurm, attempt)),
            slurm,
            partition=None if environment is None else environment.partition,
            cluster=None if environment is None else environment.cluster_name,
            knobs=Knobs.from_environ(process_environ()),
            latest=lambda: self._job_poller.latest,
            config=self._job_poller.config,
        )

    def start(self) -> None:
        """Open the channel and begin to conduct."""
        self.hub.start()
        self._attempt.next_launch(self.hub)
        self._thread.start()

    @property
    def rendezvous(self) -> Rendezvous:
        """What the other ranks need to know."""
        return Rendezvous(self.hub.addresses, self.hub.credentials, self._attempt.claim.attempt)

    def launch(self) -> LaunchFacts:
        """Its ranks are there already, and this process is one of them."""
        file, run = self._attempt.file, self._attempt.run
        state = self._attempt.state()
        conductor = Conductor(
            self.hub,
            journal=self._attempt.journal,
            job_poller=self._job_poller,
            timing=timing(
                file.job,
                state=state,
                now=time.time(),
                # Nobody limits the time of a run on this machine.
                end=None if self._slurm is None else planned_end(file.job, state),
                usual_save=file.usual_save,
            ),
            stop_file=run.stop_file,
            save_file=run.save_file,
            launched=None,
            only_warns=self._attempt.only_warns,
            expected_bandwidth=file.expected_bandwidth,
        )
        if self._lifeline is not None:
            self._lifeline.await_cut(conductor.stops.add_request)
        if self._listen is not None:
            self._listen(conductor.stops.add_signal)
        return conductor.watch()

    def relaunch(self, decision: Decision, facts: LaunchFacts) -> bool:
        """Never: this process is one of the ranks."""
        return False

    def output_of(self, rank: int) -> Path | None:
        """Submitit's business."""
        return None

    def clear(self) -> None:
        """The ranks leave with this process."""

    def depart(self, result: RequeueResult | None, cause: Cause) -> None:
        """This process ends right after: ranks end later, so the next start can't be sooner."""

    def _conduct(self) -> None:
        try:
            self.conclude()
        except FencedError as error:
            sys.stderr.write(f"slurm_forge: {error}\n")
            self._attempt.end(TAKEN_OVER)
            self._leave(0)
        except BaseException as error:
            # A conductor that dies silently would leave every rank waiting for ever.
            sys.stderr.write(f"slurm_forge: the conductor failed: {error!r}\n")
            self._leave(1)

    def conclude(self) -> None:
        """Conduct the attempt, or carry out its verdict; mostly the process ends in here."""
        end = self._loop.run()
        if end.decision is None:
            self.finished = True
            self._over.set()
            return
        self.reason = end.decision.reason
        code = 1
        if end.decision.action in REQUEUEING and end.outcome != RequeueOutcome.STOPPED.value:
            code = self._requeue_exit_code or 0
        self._leave(code)

    def wait_before_restart(self, seconds: float) -> str:
        """Before whoever started the tasks starts them again; why the starter wants no more."""
        self._attempt.fence()
        self.hub.abort("the launch is over")
        until = time.monotonic() + seconds
        while True:
            why = "" if self._lifeline is None else self._lifeline.why_cut()
            if why or time.monotonic() >= until:
                if why:
                    self._attempt.stop(stopped_before_start(why))
                return why
            time.sleep(_LOOK_EVERY_S)

    def _leave(self, code: int) -> None:
        """Rank 0 may sit in a collective that will never end: only this thread can end it."""
        self.hub.abort("the launch is over")
        # The others leave when they read that, or when the channel closes with this process.
        if self._slurm is None:
            self._kill_frozen()
        sys.stdout.flush()
        sys.stderr.flush()
        self._exit(code)
        self.code = code
        self._over.set()

    def _kill_frozen(self) -> None:
        """Kill the ranks beside this one that don't leave: a stopped process hears of nothing.

        Where there is no Slurm nobody else does, and whoever waits for them would wait for ever.
        """
        until = time.monotonic() + _LEAVE_S
        while (others := self._others_here()) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in others:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _others_here(self) -> list[int]:
        here = socket.gethostname()
        return [
            member.pid
            for member in self.hub.members().values()
            if member.connected and member.host == here and member.pid != os.getpid()
        ]

    def wait_over(self) -> None:
        """For rank 0's main thread after its last words; mostly the process ends in here."""
        self._over.wait()
        self.hub.close()
        self._job_poller.close()


class _RestartedTasks(Requeuer):
    """On this machine whoever started the tasks starts them again."""

    def __init__(self, embedded: EmbeddedConductor) -> None:
        self._embedded = embedded

    def requeue(self, decision: Decision, *, urgent: bool = False) -> RequeueResult:
        """After the decision's wait, unless the starter wants no more."""
        why = self._embedded.wait_before_restart(decision.wait_s)
        return RequeueResult(
            RequeueOutcome.STOPPED if why else RequeueOutcome.REQUEUED, why or decision.reason
        )
