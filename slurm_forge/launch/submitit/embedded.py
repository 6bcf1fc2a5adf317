"""The conductor inside rank 0's process: for stock submitit executors, which have no supervisor.

Same hub, same decisions.  What needs the batch step is missing: nobody outlives rank 0, and ranks
are not started again inside the allocation, so every cure is a requeue.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from slurm_forge.control import Hub
from slurm_forge.control.interfaces import preferred_address
from slurm_forge.errors import FencedError, ForgeError, RunDirectoryError
from slurm_forge.files import read_json, write_atomic
from slurm_forge.launch.attempt.attempt import (
    REQUEUEING,
    TAKEN_OVER,
    Attempt,
)
from slurm_forge.launch.attempt.evidence import gathered
from slurm_forge.launch.attempt.lifeline import Lifeline
from slurm_forge.launch.attempt.stop_between_attempts import before_next_start
from slurm_forge.launch.attempt.stop_explanation import StopExplanation
from slurm_forge.launch.attempt.unrecognized import note_unrecognized
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.conductor.job_poller import JobWatch
from slurm_forge.launch.render.schedule import (
    planned_end,
    timing,
)
from slurm_forge.launch.requeue.job_update import update_for
from slurm_forge.launch.requeue.requeue import Ladder
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.policy.requeue_delay import sooner
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import Slurm
from slurm_forge.vocabulary.decision import Action, Decision

__all__ = ["Embedded", "Rendezvous", "await_rendezvous", "withdraw"]

_LIMIT = 1 << 16
#: How long ranks that were told to leave may take.
_LEAVE_S = 3.0
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank 0 of this attempt hosts the control channel; None of it when it refuses."""

    channel: str
    nonce: str
    attempt: int

    def publish(self, run: RunDirectory, key: str) -> None:
        """Write it for the other ranks; readable by the user alone, because of the nonce."""
        body = {"channel": self.channel, "nonce": self.nonce, "attempt": self.attempt}
        write_atomic(run.rendezvous(key), json.dumps(body).encode())


def withdraw(run: RunDirectory, key: str) -> None:
    """Remove the file, so that the next attempt under the same key isn't misled."""
    run.rendezvous(key).unlink(missing_ok=True)


def await_rendezvous(
    run: RunDirectory,
    key: str,
    usable: Callable[[Rendezvous], bool],
    *,
    unwanted: Callable[[], bool] = lambda: False,
    wait_s: float = 120.0,
) -> Rendezvous | None:
    """What rank 0 published, once ``usable`` says that it is alive; None once the run is done,
    or ``unwanted``.

    A file left by an older attempt names a hub that nobody answers at, or with another nonce.
    """
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if unwanted():
            return None
        try:
            body = read_json(run.rendezvous(key), _LIMIT)
            found = Rendezvous(str(body["channel"]), str(body["nonce"]), int(body["attempt"]))
        except (OSError, RunDirectoryError, KeyError, ValueError, TypeError):
            found = None
        if found is not None and not found.channel:
            return None
        if found is not None and usable(found):
            return found
        time.sleep(0.05)
    raise RunDirectoryError(
        f"rank 0 did not say where it is within {wait_s:.0f} s ({run.rendezvous(key)})",
        next_step="Look at the log of rank 0; is the run directory on storage that all nodes see?",
    )


class Embedded:
    """Conducts from a thread of rank 0; ``exit_code`` decides how this process then ends."""

    def __init__(
        self,
        attempt: Attempt,
        *,
        world_size: int,
        job: str,
        slurm: Slurm | None,
        requeue_exit_code: int | None,
        leave: Callable[[int], None] | None = None,
        lifeline: Lifeline | None = None,
        ear: Callable[[Callable[[str, str], None]], None] | None = None,
    ) -> None:
        self._attempt = attempt
        self._slurm = slurm
        self._job = job
        self._requeue_exit_code = requeue_exit_code
        self._exit = leave or os._exit
        self._lifeline = lifeline
        #: Given the conductor's ``hear``: for signals that reach none of the ranks.
        self._ear = ear
        file = attempt.file
        self.hub = Hub(
            world_size=world_size,
            nonce=secrets.token_hex(16),
            interface_address=preferred_address(file.socket_interface, file.host_suffix),
        )
        self._watch = JobWatch(slurm, job)
        self._began = datetime.now(timezone.utc)
        self._thread = threading.Thread(target=self._conduct, name="forge-conductor", daemon=True)
        self._over = threading.Event()
        self._decision: Decision | None = None
        #: Set once the attempt is over (and this process still lives).
        self.finished = False
        self.code = 0

    def start(self) -> None:
        """Open the channel and begin to conduct."""
        self.hub.start()
        self._attempt.next_launch(self.hub)
        self._thread.start()

    @property
    def rendezvous(self) -> Rendezvous:
        """What the other ranks need to know."""
        return Rendezvous(self.hub.addresses, self.hub.nonce, self._attempt.claim.attempt)

    def _conduct(self) -> None:
        file, run = self._attempt.file, self._attempt.run
        state = self._attempt.state()
        conductor = Conductor(
            self.hub,
            journal=self._attempt.journal,
            watch=self._watch,
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
            self._lifeline.await_cut(conductor.stop)
        if self._ear is not None:
            self._ear(conductor.hear)
        try:
            facts = conductor.watch()
            self._conclude(facts)
        except FencedError as error:
            sys.stderr.write(f"slurm_forge: {error}\n")
            self._attempt.end(TAKEN_OVER)
            self._leave(0)
        except BaseException as error:
            # A conductor that dies silently would leave every rank waiting for ever.
            sys.stderr.write(f"slurm_forge: the conductor failed: {error!r}\n")
            self._leave(1)

    def _conclude(self, facts: LaunchFacts) -> None:
        attempt = self._attempt
        if self._watch.latest is not None:
            note_unrecognized(attempt, self._watch.latest.unrecognized)
        self._decision = attempt.conclude(
            gathered(
                facts,
                run=attempt.run,
                attempt=attempt.claim.attempt,
                launch=attempt.launch,
                job=self._job,
                slurm=self._slurm,
                restart_count=attempt.claim.restart_count,
                since=self._began,
            )
        )
        if self._decision is None:
            self._attempt.end("finished")
            self.finished = True
            self._over.set()
            return
        self.carry_out(self._decision)

    def carry_out(self, decision: Decision) -> None:
        """Do what was decided, and leave."""
        self._decision = decision
        code = 0
        outcome = self._decision.action.value
        if self._decision.action in REQUEUEING:
            if self._slurm is None:
                outcome, code = "requeued", self._requeue_exit_code or 0
                self._attempt.fence()
                why = self._wait(self._decision.wait_s)
                if why:
                    self._attempt.stop(before_next_start(why))
                    outcome, code = "stop", 1
            else:
                update = update_for(self._decision, self._attempt.file.job, self._watch.latest)
                wait = timedelta(seconds=self._decision.wait_s)
                climbed = self._ladder(self._slurm).climb(
                    self._decision.reason, update, wait=wait, soon=self._sooner
                )
                outcome = climbed.taken.value
        else:
            code = 1
            if self._decision.action is Action.HOLD and self._slurm is not None:
                outcome = self._ladder(self._slurm).hold(self._decision.reason).taken.value
        self._attempt.end(outcome)
        sys.stderr.write(f"slurm_forge: {self._decision.reason}: {outcome}\n")
        self._leave(code)

    def _sooner(self) -> timedelta | None:
        """The ranks end after this one, and nobody is left to say when: the longest of all."""
        attempt = self._attempt
        if self._slurm is None or not attempt.file.shorten_requeue:
            return None
        try:
            soon = sooner(self._slurm.show_config(), attempt.state().attempts)
        except ForgeError:
            return None
        return None if soon is None else soon.at_worst

    def _ladder(self, slurm: Slurm) -> Ladder:
        return Ladder(
            slurm,
            job=self._job,
            restart_count=self._attempt.claim.restart_count,
            script=None,
            journal=self._attempt.journal,
            fence=self._attempt.fence,
            patience=self._attempt.file.job.recovery.limits.controller_patience,
            only_hold=self._attempt.file.only_hold,
            explain=StopExplanation(slurm, self._attempt),
        )

    def _wait(self, seconds: float) -> str:
        """Before whoever started the tasks starts them again; why the starter wants no more."""
        self.hub.abort("the launch is over")
        until = time.monotonic() + seconds
        while True:
            why = "" if self._lifeline is None else self._lifeline.why_cut()
            if why or time.monotonic() >= until:
                return why
            time.sleep(_LOOK_EVERY_S)

    def _leave(self, code: int) -> None:
        """Rank 0 may sit in a collective that will never end: only this thread can end it."""
        self.hub.abort("the launch is over")
        # The others leave when they read that, or when the channel closes with this process.
        if self._slurm is None:
            self._end_frozen()
        sys.stdout.flush()
        sys.stderr.flush()
        self._exit(code)
        self.code = code
        self._over.set()

    def _end_frozen(self) -> None:
        """Kill the ranks beside this one that don't leave: a stopped process hears of nothing.

        Where there is no Slurm nobody else does, and whoever waits for them would wait for ever.
        """
        until = time.monotonic() + _LEAVE_S
        while (left := self._others_here()) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _others_here(self) -> list[int]:
        here = socket.gethostname()
        return [
            member.pid
            for member in self.hub.members().values()
            if member.connected and member.host == here and member.pid != os.getpid()
        ]

    @property
    def reason(self) -> str:
        """Why the attempt ended, for the user."""
        return "" if self._decision is None else self._decision.reason

    def wait_over(self) -> None:
        """For rank 0's main thread after its last words; mostly the process ends in here."""
        self._over.wait()
        self.hub.close()
        self._watch.close()
