"""One attempt inside a job of Slurm's: claim it, run its loop, and leave nothing open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from slurm_forge.errors import FencedError, ForgeError
from slurm_forge.journal import JournalWriter, fold, newest_attempt_in, read_to_fold
from slurm_forge.journal.events import Held
from slurm_forge.journal.file import NO_LAUNCH
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import TAKEN_OVER, Attempt, StartRefusal, begin
from slurm_forge.launch.attempt.attempt_loop import AttemptEnd, AttemptLoop, FrontEnd, print_line
from slurm_forge.launch.attempt.report_refresh import ReportRefresh
from slurm_forge.launch.attempt.requeuer import SlurmRequeuer, make_job_requeuer
from slurm_forge.launch.attempt.stop_explanation import StopExplanation
from slurm_forge.launch.attempt.storage_lost import hand_to_slurm
from slurm_forge.launch.attempt.unrecognized import note_unrecognized
from slurm_forge.launch.conductor.job_poller import JobPoller
from slurm_forge.launch.notify.sender_process import notifications, send_pending
from slurm_forge.launch.render.array_chain import VIA_ARRAY, chain_of
from slurm_forge.launch.render.outputs import own_output
from slurm_forge.launch.requeue.requeue import RequeueOutcome
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.vocabulary.cause import Cause

_NOTHING = "nothing to do"
_REFUSED = {
    StartRefusal.DONE: f"finished already: {_NOTHING}",
    StartRefusal.STOP_FILE: "stopped: to continue, remove {stop}",
    StartRefusal.AT_REST: "at rest; why: slurm-forge explain {name}; to continue: slurm-forge "
    "requeue {name}",
}


class StepSignals(Protocol):
    """Signals for the batch step, as far as an attempt needs to know of them."""

    @property
    def terminated(self) -> bool:
        """Whether one has told the batch step to end."""

    def batch_signals_since(self) -> tuple[str, ...]:
        """Those since the last launch ended."""


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """What a front end starts its launches with."""

    attempt: Attempt
    environment: SlurmEnvironment
    variables: Mapping[str, str]
    slurm: Slurm
    job_poller: JobPoller
    requeuer: SlurmRequeuer


def conduct_in_job(
    run: RunDirectory,
    front_end: Callable[[JobAttempt], FrontEnd],
    *,
    environment: SlurmEnvironment,
    variables: Mapping[str, str],
    slurm: Slurm,
    via: str,
    signals: StepSignals,
    script: Callable[[], Path | None],
    prepare: Callable[[], None] = lambda: None,
    command: bool = False,
) -> AttemptEnd:
    """Claim the run for this start of the job, and conduct one attempt.

    Args:
        run: The run.
        front_end: Makes what starts the launches, once the attempt has begun.
        environment: What Slurm says of the job.
        variables: The environment of the batch step.
        slurm: The client for every question.
        via: How the job was handed in.
        signals: What the batch step was told.
        script: The script of a successor, asked for once the attempt has begun.
        prepare: Called before the run is claimed.
        command: The front end starts the run's command, not its entry.

    Returns:
        What the attempt came to; without a decision where nothing had to be done, where another
        attempt has taken over, and (``code`` 1) where the run directory can't be used.
    """
    job = environment.job_ref

    def storage_lost(error: OSError) -> AttemptEnd:
        requeue_text = hand_to_slurm(
            slurm,
            job,
            f"the run directory: {error}",
            restart_count=environment.restart_count,
            in_chain=via == VIA_ARRAY,
            signalled=lambda: signals.terminated,
        )
        print_line(f"the run directory can't be used ({error}): {requeue_text}")
        return AttemptEnd(outcome="storage lost", code=1)

    try:
        run.refuse_others()
        prepare()
        attempt = begin(
            run,
            job=job,
            restart_count=environment.restart_count,
            nodes=environment.nodes,
            via=via,
            slurm=slurm,
            command=command,
        )
    except FencedError as error:
        print_line(str(error))
        return AttemptEnd(outcome=TAKEN_OVER)
    except OSError as error:
        return storage_lost(error)
    if isinstance(attempt, StartRefusal):
        print_line(refusal_text(run, attempt, command=command))
        settle_waiting_tasks(run, attempt, job, slurm)
        send_pending(run)
        return AttemptEnd(outcome=_NOTHING)
    note_unrecognized(attempt, environment.unrecognized)
    job_poller = JobPoller(slurm, job)
    output = own_output()
    try:
        with notifications(run, attempt.file.job.notify):
            with attempt.held_on_error():
                explain = StopExplanation(
                    slurm, attempt, signals.batch_signals_since, output=output
                )
                requeuer = SlurmRequeuer(
                    attempt,
                    make_job_requeuer(attempt, slurm, job=job, script=script(), explain=explain),
                    slurm,
                    partition=environment.partition,
                    cluster=environment.cluster_name,
                    knobs=Knobs.from_environ(variables),
                    latest=lambda: job_poller.latest,
                    config=job_poller.config,
                )
                requeuer.prepare()
                number = attempt.claim.attempt
                loop = AttemptLoop(
                    attempt,
                    front_end(
                        JobAttempt(attempt, environment, variables, slurm, job_poller, requeuer)
                    ),
                    requeuer,
                    job_poller,
                    slurm=slurm,
                    job=job,
                    output=output,
                    report=ReportRefresh(run, number) if attempt.file.job.report else None,
                )
            return loop.run()
    except FencedError as error:
        print_line(str(error))
        attempt.end(TAKEN_OVER)
        return AttemptEnd(outcome=TAKEN_OVER)
    except OSError as error:
        return storage_lost(error)
    finally:
        job_poller.close()


def refusal_text(run: RunDirectory, why: StartRefusal, *, command: bool = False) -> str:
    """Why nothing is started, in words; ``command``: of ``slurm-forge exec``."""
    text = f"{run.name}: {_REFUSED[why].format(name=run.name, stop=run.stop_file)}"
    another = command and why is StartRefusal.DONE
    return f"{text}.   another run: --name OTHER" if another else text


def settle_waiting_tasks(run: RunDirectory, why: StartRefusal, job: str, slurm: Slurm) -> None:
    """Keep the tasks that wait from starting only to find out the same; best effort.

    Of a finished run they are cancelled; of one that rests they are held until a person wants it
    to go on.
    """
    with contextlib.suppress(ForgeError, OSError):
        chain = chain_of(job, read_run_file(run.spec_file).job.chain, slurm)
        if chain is None:
            return
        if why is StartRefusal.DONE:
            chain.cancel_waiting()
            return
        waiting = chain.waiting()
        if not waiting:
            return
        records = read_to_fold(run, refresh=True)
        state = fold(records)
        reason = state.reason or "the run rests"
        if chain.hold(waiting, reason):
            return
        number = newest_attempt_in(records)
        journal = JournalWriter(run, attempt=number, writer="supervisor", launch=NO_LAUNCH)
        journal.advance_clock(records)
        # Whoever releases them wants it to go on: nothing else starts them.
        journal.write(Held(job=chain.array, restart_count=0, reason=reason, confirmed=True))
        journal.close()


#: What was taken for a preemption may be none: then nodes stand idle for so long.
_LONGEST = timedelta(minutes=5)


def slurm_kill_patience(outcome: RequeueOutcome, cause: Cause) -> timedelta:
    """How long the batch step waits to be ended by Slurm before it leaves by itself.

    Slurm itself requeues what it preempts with PreemptMode=REQUEUE; up to 23.11 not where the job
    ends by itself in its grace time (tried on 22.05.8).  So where compute nodes have no scontrol,
    or it gets no answer, to be there still is what brings the run back.
    """
    return (
        _LONGEST if outcome is RequeueOutcome.PENDING and cause is Cause.PREEMPTED else timedelta(0)
    )
