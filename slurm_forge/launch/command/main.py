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
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import ConfigError, ForgeError
from slurm_forge.journal.events import Note
from slurm_forge.launch.attempt.attempt import RELAUNCHING
from slurm_forge.launch.attempt.attempt_loop import FrontEnd
from slurm_forge.launch.attempt.failed_start import reporting_failed_start
from slurm_forge.launch.attempt.job_attempt import JobAttempt, conduct_in_job, slurm_kill_patience
from slurm_forge.launch.command.launcher import CommandLauncher
from slurm_forge.launch.command.local import execute_here
from slurm_forge.launch.command.program_signals import ProgramSignals
from slurm_forge.launch.command.signal_listener import (
    SentinelStep,
    sentinel_command,
    sentinel_environment,
)
from slurm_forge.launch.command.successor_script import (
    arguments_of,
    for_successor,
)
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.launch.requeue.requeue import RequeueOutcome, RequeueResult
from slurm_forge.launch.submit.run_arguments import run_of_arguments
from slurm_forge.launch.submit.submission import (
    keep_own_script,
    kept_script,
    note_asked,
)
from slurm_forge.recovery import LaunchFacts
from slurm_forge.run_directory import RunDirectory
from slurm_forge.signals import SignalWatcher
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Decision

#: How long the first start waits for the sentinel to listen: notice is rarely given at once.
_LISTENS_S = 3.0
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

    def prepare() -> None:
        if via != VIA_ARRAY:  # its tasks were all handed in together
            note_asked(run, environment.job_ref, environment.restart_count, slurm)

    def script() -> Path | None:
        _keep_script(run, slurm, environment, via)
        return kept_script(run)

    with ProgramSignals() as signals, contextlib.ExitStack() as stack:
        SignalWatcher(signals.batch)
        signal.signal(signal.SIGINT, signals.interrupt)  # somebody in salloc
        end = conduct_in_job(
            run,
            lambda job: _JobLauncher(job, signals, words, stack),
            environment=environment,
            variables=variables,
            slurm=slurm,
            via=via,
            signals=signals,
            script=script,
            prepare=prepare,
            command=True,
        )
    return (end.status or end.code) if end.code else 0


def _refuse_places(environment: SlurmEnvironment) -> None:
    if environment.heterogeneous:
        raise ForgeError(
            f"job {environment.job_ref} is heterogeneous: it can't be brought back",
            next_step="Ask for one kind of node: no hetjob, no ':' between options of sbatch.",
        )
    if environment.in_srun_step and (environment.ntasks or 1) > 1:
        raise ConfigError(
            "slurm-forge exec was started by srun, once per task: each would claim the run",
            next_step="Put them in the other order: slurm-forge exec -- srun your-program …",
        )


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


class _JobLauncher(CommandLauncher, FrontEnd):
    """Starts the command in a job, beside a sentinel that hears what its steps are told."""

    def __init__(
        self,
        job: JobAttempt,
        signals: ProgramSignals,
        words: tuple[str, ...],
        stack: contextlib.ExitStack,
    ) -> None:
        sentinel = SentinelStep(
            sentinel_command(sys.executable, job.environment.node_name),
            sentinel_environment(job.variables),
            signals.steps,
        )
        stack.callback(sentinel.close)
        super().__init__(
            job.attempt,
            job.variables,
            signals,
            job.job_poller,
            slurm=job.slurm,
            environment=job.environment,
            sentinel=sentinel,
            words=words,
            kill_wait=lambda: job.requeuer.kill_wait,
        )
        stack.callback(self.clear)
        self._job = job
        self._listener = sentinel

    def launch(self) -> LaunchFacts:
        """The first start waits for the sentinel, and for what Slurm says of the job."""
        if self._attempt.launch == 0:
            self._job_poller.ask()
            self._await_sentinel()
            self._await_time_limit()
        return super().launch()

    def relaunch(self, decision: Decision, facts: LaunchFacts) -> bool:
        """Unless a step was signalled, or a node is to be avoided: that can't be done here."""
        if decision.action not in RELAUNCHING or facts.rank_signals:
            return False
        if not self._job.requeuer.nodes_to_avoid(decision).isdisjoint(self._job.environment.nodes):
            return False
        self.clear()
        self._signals.wait(decision.wait_s)
        return True

    def depart(self, result: RequeueResult | None, cause: Cause) -> None:
        """Slurm ends a job that goes back into the queue.

        What stands behind us in the script is not meant for a run that is not through.
        """
        if result is not None:
            back = result.outcome in (RequeueOutcome.REQUEUED, RequeueOutcome.HELD)
            stay = _ENDED_WITHIN if back else slurm_kill_patience(result.outcome, cause)
            self._signals.wait_for_the_end(stay.total_seconds())
        self._listener.close()  # its step would be seen to end after the begin time
        self._job.requeuer.shorten_requeue_delay()

    def _await_sentinel(self) -> None:
        if self._listener.listens(_LISTENS_S):
            return
        why = self._listener.failed or "it takes its time"
        text = f"no sentinel step ({why}): Slurm is queried now and then instead"
        with contextlib.suppress(OSError):
            self._attempt.journal.write(Note(text=text[:400]))

    def _await_time_limit(self) -> None:
        """How long before the end the program is told rests on the job's own time limit."""
        until = time.monotonic() + _FIRST_ANSWER_S
        while (
            not self._job_poller.collect() and self._job_poller.asking and time.monotonic() < until
        ):
            time.sleep(_TICK_S)


def main(argv: Sequence[str] | None = None) -> int:
    """``RUN|--array FILE [--via NAME] [-- COMMAND…]``, conducted as its ``run.yaml`` says.

    The command is there, too, where the script does not have it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command: tuple[str, ...] = ()
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], tuple(words[at + 1 :])
    try:
        run, via, _ = run_of_arguments(words)
        with reporting_failed_start(run, os.environ):
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
