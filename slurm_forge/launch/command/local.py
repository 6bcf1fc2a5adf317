"""``slurm-forge exec`` on a machine without Slurm: what would be a requeue is another start."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

from slurm_forge.errors import FencedError, RunDirectoryError
from slurm_forge.journal.events import VIA_THIS_MACHINE
from slurm_forge.launch.attempt.attempt import (
    RELAUNCHING,
    REQUEUEING,
    TAKEN_OVER,
    Attempt,
    Refusal,
    begin,
)
from slurm_forge.launch.attempt.attempt_signals import AskedToStop
from slurm_forge.launch.attempt.evidence import gathered
from slurm_forge.launch.attempt.run_lock import present
from slurm_forge.launch.command.program_signals import ProgramSignals
from slurm_forge.launch.command.starts import Starts
from slurm_forge.launch.conductor.job_poller import JobWatch
from slurm_forge.launch.submit.submission import note_asked
from slurm_forge.run_directory import RunDirectory

__all__ = ["ENDED_BY_SIGNAL", "execute_here", "refused", "say"]

#: Added to the number of the signal by which a person ended it, as shells do.
ENDED_BY_SIGNAL = 128
_REFUSED = {
    Refusal.DONE: "finished already: nothing to do.   another run: --name OTHER",
    Refusal.STOP_FILE: "stopped: remove {stop} to let it go on",
    Refusal.AT_REST: "at rest: slurm-forge explain {name} says why, slurm-forge requeue {name} "
    "lets it go on",
}


def refused(run: RunDirectory, why: Refusal) -> str:
    """Why nothing is started, in words."""
    return f"{run.name}: {_REFUSED[why].format(name=run.name, stop=run.stop_file)}"


def say(text: str) -> None:
    """For whoever reads the output of the command."""
    sys.stderr.write(f"slurm_forge: {text}\n")


def execute_here(run: RunDirectory, variables: Mapping[str, str]) -> int:
    """Start the command until it is done, or left to a person; the exit status."""
    if run.is_done():
        say(refused(run, Refusal.DONE))
        return 0
    job = f"exec-{os.getpid()}"
    with ProgramSignals() as signals, present(run) as presence, AskedToStop() as asked:
        signals.listen_to(asked)
        presence.name(job)
        run.stop_file.unlink(missing_ok=True)
        note_asked(run, job, 0, None)
        while True:
            begun = begin(
                run,
                job=job,
                restart_count=0,
                nodes=(socket.gethostname(),),
                via=VIA_THIS_MACHINE,
                command=True,
            )
            if isinstance(begun, Refusal):
                say(refused(run, begun))
                return 0
            try:
                status = _attempt_here(begun, variables, signals)
            except FencedError as error:
                say(str(error))
                begun.end(TAKEN_OVER)
                return 1
            except OSError as error:
                raise RunDirectoryError(
                    f"{run.path} can't be written: {error}",
                    next_step="Make room or check the quota, then start the same command again.",
                ) from error
            if asked and not run.is_done():
                say(f"{run.name}: stopped.   go on: the same command again")
                return ENDED_BY_SIGNAL + asked.number
            if status is not None:
                return status


def _attempt_here(
    attempt: Attempt, variables: Mapping[str, str], signals: ProgramSignals
) -> int | None:
    """The exit status, or None where another attempt is to follow."""
    if attempt.verdict is not None:
        attempt.end(attempt.verdict.action.value)
        say(f"{attempt.run.name}: {attempt.verdict.reason}")
        return 1
    starts = Starts(attempt, variables, signals, JobWatch(None, ""))
    while True:
        started = starts.start()
        facts = gathered(
            started.facts,
            run=attempt.run,
            attempt=attempt.claim.attempt,
            launch=attempt.launch,
            since=starts.launched_at,
        )
        try:
            decision = attempt.conclude(facts)
        finally:
            started.clear()
        if decision is None:
            attempt.end("finished")
            return 0
        going_on = decision.action in REQUEUEING
        say(
            f"{attempt.run.name}: {decision.reason}"
            + (": started again" if going_on and not signals.stopping else "")
        )
        if not going_on:
            attempt.end(decision.action.value)
            return facts.exit_status or 1
        signals.wait(decision.wait_s)
        if decision.action not in RELAUNCHING or signals.stopping:
            attempt.end("requeued")
            return None
