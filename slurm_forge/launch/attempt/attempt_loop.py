"""The loop of one attempt: launch, judge the end, then launch again, give the job back, or stop.

Every front end runs it: the supervisor (srun), ``slurm-forge exec`` (a command, in a job or on this
machine) and rank 0 under one of submitit's own executors.  They differ in what starts a launch
(``FrontEnd``) and in how the run comes back (``Requeuer``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from slurm_forge.errors import FencedError, ForgeError, RunDirectoryError
from slurm_forge.launch.attempt.attempt import REQUEUEING, Attempt
from slurm_forge.launch.attempt.evidence import gather_evidence
from slurm_forge.launch.attempt.report_refresh import ReportRefresh
from slurm_forge.launch.attempt.unrecognized import note_unrecognized
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.render.outputs import Output
from slurm_forge.launch.requeue.requeue import RequeueOutcome, RequeueResult
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.incident.slurm_evidence import is_ending
from slurm_forge.slurm.client import Slurm
from slurm_forge.vocabulary.cause import SLURM_INTERRUPTIONS, USER_REQUESTS, Cause
from slurm_forge.vocabulary.decision import Action, Decision

#: The queue is cheaper to wait in than an allocation.
_LONGEST_PAUSE_S = 120.0


class FrontEnd(Protocol):
    """What starts the launches of an attempt, where it runs."""

    def launch(self) -> LaunchFacts:
        """Start one launch and conduct it to its end; what was seen of it."""

    def relaunch(self, decision: Decision, facts: LaunchFacts) -> bool:
        """Get ready for another launch in the same place, after the decision's wait.

        False where that can't be done here: then the run leaves.
        """

    def output_of(self, rank: int) -> Path | None:
        """The log of a rank, where it has one of its own."""

    def clear(self) -> None:
        """End whatever is left of the last launch."""

    def depart(self, result: RequeueResult | None, cause: Cause) -> None:
        """The last act of an attempt that does not finish, once it is settled what comes next.

        ``result`` is None where the run does not come back and is not held.
        """


class Requeuer:
    """How the run of an attempt comes back.  Here: whoever has started it starts it again."""

    @property
    def kill_wait(self) -> timedelta | None:
        """slurm.conf's KillWait, where it is known."""
        return None

    @property
    def grace_time(self) -> timedelta | None:
        """How much notice a preemption gives, where it is known."""
        return None

    def strike(self, decision: Decision) -> None:
        """Note what the incident says against the nodes that it started on."""

    def requeue(self, decision: Decision, *, urgent: bool = False) -> RequeueResult:
        """Have the run start again, as it was decided; ``urgent``: time is short."""
        return RequeueResult(RequeueOutcome.REQUEUED, decision.reason)

    def hold(self, reason: str) -> RequeueResult:
        """Leave it to a person."""
        return RequeueResult(RequeueOutcome.HELD_IN_JOURNAL, reason)

    def stay_ended(self, decision: Decision) -> None:
        """The run is neither to come back nor to be held."""

    def finished(self) -> None:
        """The run is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """What an attempt came to.

    Attributes:
        outcome: The word for it, as in the journal.
        decision: What was decided; None where the run is finished, or no attempt began.
        status: The exit status of the last launch, where there was one.
        code: The exit status for whoever started the attempt.
    """

    outcome: str
    decision: Decision | None = None
    status: int | None = None
    code: int = 0


class AttemptLoop:
    """Launch after launch inside one attempt.

    Args:
        attempt: The attempt, which has begun.
        front_end: Starts the launches.
        requeuer: Brings the run back once this attempt gives it up.
        job_poller: Has the newest record of the job.
        slurm: Asked for evidence of how a launch ended; None on a machine without it.
        job: The job's number for ``slurm``.
        output: Where slurmstepd writes why it ends the job.
        say: Takes a line for whoever reads the job's output.
        longest_pause_s: A launch that has to wait for longer is waited for in the queue.
        report: Keeps the run's report up to date, where that is wanted.
    """

    def __init__(
        self,
        attempt: Attempt,
        front_end: FrontEnd,
        requeuer: Requeuer,
        job_poller: JobPoller,
        *,
        slurm: Slurm | None = None,
        job: str = "",
        output: Output | None = None,
        say: Callable[[str], None] | None = None,
        longest_pause_s: float = _LONGEST_PAUSE_S,
        report: ReportRefresh | None = None,
    ) -> None:
        self._attempt = attempt
        self._front_end = front_end
        self._requeuer = requeuer
        self._job_poller = job_poller
        self._slurm = slurm
        self._job = job
        self._output = output
        self._say = say or print_line
        self._longest_pause_s = longest_pause_s
        self._report = report

    def run(self) -> AttemptEnd:
        """Until the run is finished, is given back, or rests; an error of a launch holds it.

        ``FencedError`` once a newer attempt owns the run, ``RunDirectoryError`` where nothing can
        be written down: then the run was held.
        """
        attempt, front_end = self._attempt, self._front_end
        if attempt.verdict is not None:
            return self._give_back(attempt.verdict)
        while True:
            try:
                facts = front_end.launch()
            except FencedError:
                raise
            except ForgeError as error:
                return self._give_back(self._hold(error))
            decision = self._conclude(facts)
            if decision is None:
                front_end.clear()
                self._requeuer.finished()
                self._end("finished")
                if self._report is not None:
                    self._report.finish(urgent=not _may_stay(facts))
                return AttemptEnd(outcome="finished")
            if decision.cause not in SLURM_INTERRUPTIONS:
                self._requeuer.strike(decision)
            short = decision.wait_s <= self._longest_pause_s
            if not (short and _may_stay(facts) and front_end.relaunch(decision, facts)):
                return self._give_back(decision, facts.exit_status)

    def _conclude(self, facts: LaunchFacts) -> Decision | None:
        """What is done about it.  Where nothing can be written down, a person has to see to it."""
        attempt = self._attempt
        if self._job_poller.latest is not None:
            note_unrecognized(attempt, self._job_poller.latest.unrecognized)
        try:
            facts = gather_evidence(
                replace(facts, grace=self._requeuer.grace_time),
                run=attempt.run,
                attempt=attempt.claim.attempt,
                launch=attempt.launch,
                job=self._job,
                slurm=self._slurm,
                output_of=self._front_end.output_of,
                batch_output=self._output,
                restart_count=attempt.claim.restart_count,
                since=attempt.launched_at,
            )
            return attempt.conclude(facts)
        except RunDirectoryError as error:
            self._requeuer.hold(error.message)
            raise

    def _hold(self, error: ForgeError) -> Decision:
        """The decision that a person has to see to what keeps ranks from being started."""
        try:
            return self._attempt.hold(error)
        except FencedError:
            raise
        except (OSError, ForgeError):  # not even the journal can be read: that is the error
            self._requeuer.hold(error.message)
            raise error from None

    def _give_back(self, decision: Decision, status: int | None = None) -> AttemptEnd:
        """Settle what comes next, first of all where time is short; then end what is left."""
        outcome, result = settle(decision, self._requeuer)
        self._front_end.clear()
        self._end(outcome)
        self._say(f"{self._attempt.run.name}: {decision.reason}: {outcome}")
        self._front_end.depart(result, decision.cause)
        if self._report is not None:
            self._report.finish(urgent=_is_urgent(decision))
        code = 1 if decision.action is Action.RAISE else 0
        return AttemptEnd(outcome=outcome, decision=decision, status=status, code=code)

    def _end(self, outcome: str) -> None:
        self._attempt.end(outcome)
        if self._report is not None:
            self._report.last()


def settle(decision: Decision, requeuer: Requeuer) -> tuple[str, RequeueResult | None]:
    """Requeue, hold or rest, as it was decided; the word for it, and what became of a request."""
    if decision.action in REQUEUEING:
        result = requeuer.requeue(decision, urgent=decision.cause in SLURM_INTERRUPTIONS)
    elif decision.action is Action.HOLD:
        result = requeuer.hold(decision.reason)
    else:
        requeuer.stay_ended(decision)
        return "raised" if decision.action is Action.RAISE else decision.action.value, None
    return result.outcome.value, result


def _is_urgent(decision: Decision) -> bool:
    """Whether Slurm may end the job at any moment."""
    ends = decision.cause in SLURM_INTERRUPTIONS | USER_REQUESTS
    return ends or decision.action is not Action.HOLD


def _may_stay(facts: LaunchFacts) -> bool:
    """Whether the allocation is still ours to start something in.

    A signal that only ranks have heard proves nothing: srun sends it to the others when one fails.
    """
    stop_requested = facts.batch_signals or facts.due_time_limit or facts.stop_file
    return not stop_requested and not is_ending(facts)


def print_line(text: str) -> None:
    """For whoever reads the output of the process."""
    sys.stderr.write(f"slurm_forge: {text}\n")
