"""``slurm-forge exec``: attempt after attempt of a program that knows nothing of us.

In a batch step beside Slurm, or on a machine without it.  The process ``execute RUN`` is what the
script of a job with ``command:`` starts.  Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from slurm_forge.errors import ConfigError, FencedError, ForgeError, RunDirectoryError
from slurm_forge.journal.events import Note
from slurm_forge.launch.attempt.attempt import (
    RELAUNCHING,
    REQUEUEING,
    TAKEN_OVER,
    Attempt,
    Refusal,
    begin,
)
from slurm_forge.launch.attempt.evidence import gathered
from slurm_forge.launch.attempt.failed_start import telling_why_not_started
from slurm_forge.launch.attempt.requeuer import (
    ComingBack,
    nothing_to_do,
    stays_on,
    way_back,
)
from slurm_forge.launch.attempt.storage_lost import leave_to_slurm
from slurm_forge.launch.attempt.unrecognized import note_unrecognized
from slurm_forge.launch.command.local import (
    execute_here,
    refused,
    say,
)
from slurm_forge.launch.command.program_signals import ProgramSignals
from slurm_forge.launch.command.signal_listener import (
    SentinelStep,
    sentinel_command,
    sentinel_environment,
)
from slurm_forge.launch.command.starts import (
    Started,
    Starts,
)
from slurm_forge.launch.command.successor_script import (
    arguments_of,
    for_successor,
)
from slurm_forge.launch.conductor.job_poller import JobWatch
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.launch.render.outputs import own_output
from slurm_forge.launch.requeue.requeue import Taken
from slurm_forge.launch.submit.submission import (
    job_script,
    keep_own_script,
    note_asked,
)
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.incident.slurm_evidence import is_ending
from slurm_forge.run_directory import RunDirectory
from slurm_forge.signals import SignalWatcher
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision

__all__ = ["execute", "main"]

_URGENT = frozenset({Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.ADMIN_REQUEUE})
_LONGEST_PAUSE_S = 120.0
#: How long the first start waits for the sentinel to listen: notice is rarely given at once.
_LISTENS_S = 3.0
#: Slurm ends a job that goes back into the queue; what stands behind us in the script is not meant
#: for a run that is not through.
_ENDED_WITHIN = timedelta(seconds=20)
_FIRST_ANSWER_S = 2.0
_TICK_S = 0.05


def execute(
    run: RunDirectory,
    *,
    environment: SlurmEnvironment | None,
    variables: Mapping[str, str],
    slurm: Slurm | None,
    via: str,
    words: tuple[str, ...] = (),
) -> int:
    """Start the run's command, and bring it back until it is done; the exit status for the script.

    ``words`` are the command as a script has it; else it is that of the job.

    0: it is done, was requeued, is held in the queue, or somebody has stopped it.  On a machine
    without Slurm, or where the job file says raise: the command's own status where it failed for
    good, and 128 and the signal's number where a person has ended it.
    """
    if environment is None or slurm is None:
        return execute_here(run, variables)
    _refuse_places(environment)
    with ProgramSignals() as signals:
        SignalWatcher(signals.batch)
        signal.signal(signal.SIGINT, signals.interrupt)  # somebody in salloc
        return _in_job(run, environment, variables, slurm, via, signals, words)


def _refuse_places(environment: SlurmEnvironment) -> None:
    if environment.heterogeneous:
        raise ForgeError(
            f"job {environment.job_ref} is heterogeneous: it can't be brought back",
            next_step="Ask for one kind of node: no hetjob, no ':' between options of sbatch.",
        )
    if environment.in_srun_step and (environment.ntasks or 1) > 1:
        raise ConfigError(
            "slurm-forge exec was started by srun, once per task: each would claim the run",
            next_step="Turn it round: slurm-forge exec -- srun your-program …",
        )


# -- in a job --------------------------------------------------------------------------------------


def _in_job(
    run: RunDirectory,
    environment: SlurmEnvironment,
    variables: Mapping[str, str],
    slurm: Slurm,
    via: str,
    signals: ProgramSignals,
    words: tuple[str, ...],
) -> int:
    try:
        if via != VIA_ARRAY:  # its tasks were all handed in together
            note_asked(run, environment.job_ref, environment.restart_count, slurm)
        begun = begin(
            run,
            job=environment.job_ref,
            restart_count=environment.restart_count,
            nodes=environment.nodes,
            via=via,
            slurm=slurm,
            command=True,
        )
    except FencedError as error:
        say(str(error))
        return 0
    except OSError as error:
        return _stranded(slurm, environment, via, error, signals)
    if isinstance(begun, Refusal):
        say(refused(run, begun))
        nothing_to_do(run, begun, environment.job_ref, slurm)
        return 0
    note_unrecognized(begun, environment.unrecognized)
    _keep_script(run, slurm, environment, via)
    watch = JobWatch(slurm, environment.job_ref)
    script = job_script(run)
    back = way_back(
        begun,
        slurm,
        environment,
        watch,
        variables=variables,
        script=script if script.is_file() else None,
        signals=signals.batch_signals_since,
        output=own_output(),
    )
    sentinel = SentinelStep(
        sentinel_command(sys.executable, environment.node_name),
        sentinel_environment(variables),
        signals.steps,
    )
    job = _Job(begun, environment, variables, watch, back, signals, slurm, sentinel, words)
    try:
        back.prepare()
        return job.run()
    except FencedError as error:
        say(str(error))
        begun.end(TAKEN_OVER)
        return 0
    except OSError as error:
        return _stranded(slurm, environment, via, error, signals)
    finally:
        watch.close()
        sentinel.close()


def _stranded(
    slurm: Slurm, environment: SlurmEnvironment, via: str, error: OSError, signals: ProgramSignals
) -> int:
    """Nothing of the run can be known, or written down."""
    reason, count = f"the run directory: {error}", environment.restart_count
    job, in_chain = environment.job_ref, via == VIA_ARRAY
    done = leave_to_slurm(
        slurm,
        job,
        reason,
        restart_count=count,
        in_chain=in_chain,
        signalled=lambda: signals.terminated,
    )
    say(f"the run directory can't be used ({error}): {done}")
    return 1


def _keep_script(run: RunDirectory, slurm: Slurm, environment: SlurmEnvironment, via: str) -> None:
    """What a successor would be submitted with, where the job can't be requeued: best effort."""
    if via != VIA_EXEC or not isinstance(slurm, SubprocessSlurm):
        return
    with contextlib.suppress(ForgeError, OSError):
        job = environment.job_ref
        record = slurm.show_job(job)
        script = for_successor(
            slurm.batch_script(job),
            array_task=environment.array_task_id,
            arguments=() if record is None else arguments_of(record),
        )
        if script is not None:
            keep_own_script(run, script)


VIA_EXEC = "exec"


class _Job:
    """One attempt in a job of Slurm's."""

    def __init__(
        self,
        attempt: Attempt,
        environment: SlurmEnvironment,
        variables: Mapping[str, str],
        watch: JobWatch,
        back: ComingBack,
        signals: ProgramSignals,
        slurm: Slurm,
        sentinel: SentinelStep,
        words: tuple[str, ...],
    ) -> None:
        self._attempt = attempt
        self._environment = environment
        self._back = back
        self._watch = watch
        self._signals = signals
        self._slurm = slurm
        self._sentinel = sentinel
        self._status = 0
        self._output = own_output()
        self._starts = Starts(
            attempt,
            variables,
            signals,
            watch,
            slurm=slurm,
            environment=environment,
            sentinel=sentinel,
            words=words,
        )

    def run(self) -> int:
        """Until the run is done, or the job is given back."""
        if self._attempt.verdict is not None:
            return self._go(self._attempt.verdict, None)
        self._watch.ask()
        if not self._sentinel.listens(_LISTENS_S):
            why = self._sentinel.failed or "it takes its time"
            text = f"no sentinel step ({why}): Slurm is asked now and then instead"
            with contextlib.suppress(OSError):
                self._attempt.journal.write(Note(text=text[:400]))
        self._learn_the_limit()
        while True:
            started = self._starts.start(self._back.kill_wait)
            self._status = started.facts.exit_status or 0
            decision = self._concluded(started.facts)
            if decision is None:
                started.clear()
                self._back.finished()
                self._attempt.end("finished")
                return 0
            staying = decision.action in RELAUNCHING and _may_stay(started.facts)
            if decision.cause not in _URGENT:
                self._back.strike(decision)
            long = decision.wait_s > _LONGEST_PAUSE_S
            if staying and not long and not self._holds_avoided(decision):
                started.clear()
                self._signals.wait(decision.wait_s)
                continue
            return self._go(decision, started)

    def _holds_avoided(self, decision: Decision) -> bool:
        """Whether the allocation holds a node that is to be left out: that can't be done here."""
        return not self._back.avoided(decision).isdisjoint(self._environment.nodes)

    def _learn_the_limit(self) -> None:
        """How long before the end the program is told rests on the job's own time limit."""
        until = time.monotonic() + _FIRST_ANSWER_S
        while not self._watch.collect() and self._watch.asking and time.monotonic() < until:
            time.sleep(_TICK_S)

    def _concluded(self, facts: LaunchFacts) -> Decision | None:
        attempt = self._attempt
        if self._watch.latest is not None:
            note_unrecognized(attempt, self._watch.latest.unrecognized)
        try:
            return attempt.conclude(
                gathered(
                    replace(facts, grace=self._back.grace_time),
                    run=attempt.run,
                    attempt=attempt.claim.attempt,
                    launch=attempt.launch,
                    job=self._environment.job_ref,
                    slurm=self._slurm,
                    batch_output=self._output,
                    restart_count=self._environment.restart_count,
                    since=self._starts.launched_at,
                )
            )
        except RunDirectoryError as error:
            self._back.hold(error.message)
            raise

    def _go(self, decision: Decision, started: Started | None) -> int:
        outcome, stay = decision.action.value, timedelta(0)
        if decision.action in REQUEUEING:
            urgent = decision.cause in _URGENT
            taken = self._back.come_back(decision, urgent=urgent).taken
            outcome = taken.value
            stay = _ENDED_WITHIN if taken is Taken.REQUEUED else stays_on(taken, decision.cause)
        elif decision.action is Action.HOLD:
            taken = self._back.hold(decision.reason).taken
            outcome, stay = taken.value, _ENDED_WITHIN if taken is Taken.HELD else stay
        else:
            self._back.rest(decision)
            outcome = "raised" if decision.action is Action.RAISE else outcome
        if started is not None:
            started.clear()
        self._attempt.end(outcome)
        say(f"{self._attempt.run.name}: {decision.reason}: {outcome}")
        if stay:
            self._signals.wait_for_the_end(stay.total_seconds())
        self._sentinel.close()  # its step would be seen to end after the begin time
        self._back.leave()
        return (self._status or 1) if decision.action is Action.RAISE else 0


def _may_stay(facts: LaunchFacts) -> bool:
    """Whether the allocation is still ours to start something in."""
    told = facts.rank_signals or facts.batch_signals or facts.due_time_limit or facts.stop_file
    return not told and not is_ending(facts)


def main(argv: Sequence[str] | None = None) -> int:
    """``RUN [--via NAME] [-- COMMAND…]``: how it is to be treated stands in its ``run.yaml``.

    The command does, too, where the script does not have it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command: tuple[str, ...] = ()
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], tuple(words[at + 1 :])
    via = "sbatch"
    if "--via" in words[:-1]:
        at = words.index("--via")
        via = words[at + 1]
        del words[at : at + 2]
    try:
        if len(words) != 1:
            raise ForgeError(
                f"expected one run directory, got {words}",
                next_step="python -m slurm_forge.process execute RUN [-- COMMAND…]",
            )
        run = RunDirectory.existing(words[0])
        with telling_why_not_started(run, os.environ):
            environment = SlurmEnvironment.from_environ(os.environ)
            return execute(
                run,
                environment=environment,
                variables=dict(os.environ),
                slurm=None if environment is None else SubprocessSlurm.of_this_process(),
                via=via,
                words=command,
            )
    except ForgeError as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
