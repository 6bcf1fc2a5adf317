"""``slurm-forge exec`` on a machine without Slurm: what would be a requeue is another start."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping

from slurm_forge.errors import FencedError, RunDirectoryError
from slurm_forge.journal.events import VIA_THIS_MACHINE
from slurm_forge.launch.attempt.attempt import (
    RELAUNCHING,
    REQUEUEING,
    TAKEN_OVER,
    StartRefusal,
    begin,
)
from slurm_forge.launch.attempt.attempt_loop import (
    AttemptEnd,
    AttemptLoop,
    FrontEnd,
    Requeuer,
    print_line,
)
from slurm_forge.launch.attempt.job_attempt import refusal_text
from slurm_forge.launch.attempt.report_refresh import ReportRefresh
from slurm_forge.launch.attempt.run_lock import hold_run_lock
from slurm_forge.launch.attempt.stop_request import StopRequest
from slurm_forge.launch.command.launcher import CommandLauncher
from slurm_forge.launch.command.program_signals import ProgramSignals
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.notify.sender_process import notifications
from slurm_forge.launch.requeue.requeue import RequeueResult
from slurm_forge.launch.submit.submission import note_asked
from slurm_forge.recovery import LaunchFacts
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Decision

#: Added to the number of the signal by which a person ended it, as shells do.
ENDED_BY_SIGNAL = 128


def execute_here(run: RunDirectory, variables: Mapping[str, str]) -> int:
    """Start the command until it is done, or left to a person; the exit status."""
    run.refuse_others()
    if run.is_done():
        print_line(refusal_text(run, StartRefusal.DONE, command=True))
        return 0
    job = f"exec-{os.getpid()}"
    with (
        ProgramSignals() as signals,
        hold_run_lock(run) as presence,
        StopRequest() as request,
        notifications(run, read_run_file(run.spec_file).job.notify),
    ):
        signals.listen_to(request)
        presence.name(job)
        run.stop_file.unlink(missing_ok=True)
        note_asked(run, job, 0, None)
        while True:
            attempt = begin(
                run,
                job=job,
                restart_count=0,
                nodes=(socket.gethostname(),),
                via=VIA_THIS_MACHINE,
                command=True,
            )
            if isinstance(attempt, StartRefusal):
                print_line(refusal_text(run, attempt, command=True))
                return 0
            here = _LocalAttempt(attempt, variables, signals, JobPoller(None, ""))
            try:
                end = here.run()
            except FencedError as error:
                print_line(str(error))
                attempt.end(TAKEN_OVER)
                return 1
            except OSError as error:
                raise RunDirectoryError(
                    f"{run.path} can't be written: {error}",
                    next_step="Make room or check the quota, then start the same command again.",
                ) from error
            finally:
                here.clear()
            if request and not run.is_done():
                print_line(f"{run.name}: stopped.   to continue: the same command again")
                return ENDED_BY_SIGNAL + request.number
            if end.decision is None:
                return 0
            if end.decision.action not in REQUEUEING:
                return end.status or 1


class _LocalAttempt(CommandLauncher, FrontEnd, Requeuer):
    """What would be a requeue is another attempt of the same process."""

    _announced: Decision | None = None

    def run(self) -> AttemptEnd:
        """One attempt."""
        return AttemptLoop(
            self._attempt,
            self,
            self,
            self._job_poller,
            say=lambda _: None,
            longest_pause_s=math.inf,
            report=ReportRefresh(self._attempt.run, self._attempt.claim.attempt)
            if self._attempt.file.job.report
            else None,
        ).run()

    def relaunch(self, decision: Decision, facts: LaunchFacts) -> bool:
        """Unless a person stops it first."""
        if decision.action not in RELAUNCHING:
            return False
        self.clear()
        self._announce_and_wait(decision)
        return not self._signals.stopping

    def requeue(self, decision: Decision, *, urgent: bool = False) -> RequeueResult:
        """Its caller begins another attempt."""
        self._announce_and_wait(decision)
        return super().requeue(decision, urgent=urgent)

    def hold(self, reason: str) -> RequeueResult:
        """Say why."""
        print_line(f"{self._attempt.run.name}: {reason}")
        return super().hold(reason)

    def stay_ended(self, decision: Decision) -> None:
        """Say why."""
        print_line(f"{self._attempt.run.name}: {decision.reason}")

    def depart(self, result: RequeueResult | None, cause: Cause) -> None:
        """Another attempt follows at once, or none."""

    def _announce_and_wait(self, decision: Decision) -> None:
        if decision is self._announced:
            return
        self._announced = decision
        again = "" if self._signals.stopping else ": started again"
        print_line(f"{self._attempt.run.name}: {decision.reason}{again}")
        self._signals.wait(decision.wait_s)
