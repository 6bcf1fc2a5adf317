"""What rank 0 becomes when the supervisor is gone: the process ``deputy RUN``.

Slurm ends a job whose batch shell is dead, with the usual seconds between SIGTERM and SIGKILL for
its steps, and does not start it again (tried on 22.05.8: FAILED, JobLaunchFailure; a requeue from
inside those seconds is taken).  So the rank that noticed first writes down what happened and brings
the run back.  Imports no torch.

With ``--no-kill`` Slurm takes a lost node out of the job and lets the job run, also where it is the
node of the batch script: nobody would ever start anything in it again, until its time limit.  Rank
0 is mostly on that node, too.  So the first rank of another node waits (``--second``) until Slurm
does not hear from the batch node any more, and then does the same.  Not longer: with the node Slurm
gives up its steps, and SIGKILL comes to all that is left of them in the same moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from slurm_forge.control.interfaces import interfaces
from slurm_forge.errors import ConfigError, FencedError, ForgeError
from slurm_forge.journal import fold, read_to_fold
from slurm_forge.journal.events import LaunchEnded
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import Attempt
from slurm_forge.launch.attempt.attempt_loop import settle
from slurm_forge.launch.attempt.requeuer import SlurmRequeuer, make_job_requeuer
from slurm_forge.launch.render.rank_environment import (
    as_submitted,
)
from slurm_forge.launch.submit.submission import kept_script
from slurm_forge.recovery.incident.attempt_end import supervisor_lost
from slurm_forge.run_directory import Claim, Fence, RunDirectory, newest_claim
from slurm_forge.signals import SAVE_SIGNALS
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.nodelist import expand_nodes
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Incident

#: For a rank that is not rank 0.
SECOND = "--second"

#: We are ended KillWait (30 s by default) after the supervisor was: no time for long questions.
_PER_CALL = timedelta(seconds=5)
_PATIENCE = timedelta(seconds=20)
_LOOKS = 5
_BETWEEN_LOOKS_S = 0.5


def bring_back(
    run: RunDirectory,
    *,
    knobs: Knobs,
    job: str,
    slurm: Slurm,
    second: bool = False,
    cluster: str | None = None,
    lives: Callable[[Claim], bool] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Write down that the supervisor is gone, decide, and act; what became of it.

    Does nothing where it had ended on purpose, or where a newer attempt owns the run.  ``second``:
    only where the node of the supervisor is lost, and with it whoever comes before us.
    """
    attempt, launch = knobs.attempt, knobs.launch
    Fence(run, attempt)()
    claim = newest_claim(run)
    if second and not (
        claim is not None
        and batch_node_lost(run, claim, launch=launch, job=job, slurm=slurm, pause=pause)
    ):
        return "nothing to do: another process requeues it"
    records = read_to_fold(run)
    state = fold(records)
    attempt_state = next((each for each in state.attempts if each.number == attempt), None)
    incident_id = f"{attempt}.{launch}"
    settled = (
        attempt_state is None
        or attempt_state.ended is not None
        or state.incident(incident_id) is not None
    )
    if run.is_done() or settled or claim is None or (lives or _lives)(claim):
        return "nothing to do"
    record = _queried_record(slurm, job, (lambda _: None) if second else pause)
    if not second and not _sure(claim, record):
        return "nothing to do: the job is running, by Slurm's record"
    newest = (
        attempt_state.launches[-1] if attempt_state is not None and attempt_state.launches else None
    )
    incident = supervisor_lost(
        record,
        incident_id,
        host=claim.host,
        step=None if newest is None else newest.step,
        restart_count=claim.restart_count,
    )
    if second:
        incident = lost_with_its_node(incident, claim)
    abandoned = Attempt.abandoned(run, claim, writer="deputy", launch=launch)
    if isinstance(slurm, SubprocessSlurm):
        as_job = as_submitted(
            abandoned.file, slurm.environment, state.plan, interfaces=interfaces()
        )
        slurm = replace(slurm, environment=as_job)
    # A full disk must not keep the run from coming back.
    decision, _ = abandoned.decide_on(
        incident,
        LaunchEnded(outcome=incident.cause.value, step=incident.step),
        record=record,
        now=datetime.now(timezone.utc),
        allocation=False,
    )
    script = kept_script(run)
    requeuer = SlurmRequeuer(
        abandoned,
        make_job_requeuer(abandoned, slurm, job=job, script=script, patience=_PATIENCE),
        slurm,
        partition=None if record is None else record.partition,
        cluster=cluster,
        knobs=knobs,
        latest=lambda: record,
    )
    outcome, _ = settle(decision, requeuer)
    abandoned.end(outcome)
    return f"{decision.reason}: {outcome}"


def _queried_record(slurm: Slurm, job: str, pause: Callable[[float], None]) -> JobRecord | None:
    """What Slurm says once it knows: for about a second the job still runs for it."""
    record: JobRecord | None = None
    for _ in range(_LOOKS):
        with contextlib.suppress(ForgeError):
            record = slurm.show_job(job)
        if record is None or record.state is not JobState.RUNNING or record.preempt_time:
            break
        pause(_BETWEEN_LOOKS_S)
    return record


def _sure(claim: Claim, record: JobRecord | None) -> bool:
    """Whether the supervisor is gone: another machine's processes can't be seen from here."""
    if claim.host == socket.gethostname() or record is None:
        return True
    return record.state is not JobState.RUNNING or record.preempt_time is not None


def _lives(claim: Claim) -> bool:
    """Whether the supervisor is there after all, as far as can be seen from its own machine."""
    if claim.host != socket.gethostname():
        return False  # what Slurm says is all there is
    try:
        os.kill(claim.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{claim.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """``RUN [--second]``; attempt and launch are in the environment that ranks were given."""
    for number in SAVE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The rank had blocked them, so that none could come in between.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SAVE_SIGNALS)
    arguments = list(sys.argv[1:] if argv is None else argv)
    second = SECOND in arguments
    arguments = [each for each in arguments if each != SECOND]
    knobs = Knobs.from_environ(os.environ)
    environment = SlurmEnvironment.from_environ(os.environ)
    if len(arguments) != 1 or environment is None:
        sys.stderr.write("slurm_forge: the deputy is started by a rank inside a Slurm job\n")
        return 1
    try:
        run = RunDirectory.existing(arguments[0])
        outcome = bring_back(
            run,
            knobs=knobs,
            job=environment.job_ref,
            second=second,
            cluster=environment.cluster_name,
            slurm=SubprocessSlurm.of_this_process().with_timeout(_PER_CALL),
        )
    except FencedError as error:
        outcome = str(error)
    except (ForgeError, OSError) as error:
        sys.stderr.write(
            f"slurm_forge: the supervisor is gone, and the run can't be requeued: {error}\n"
        )
        return 1
    sys.stderr.write(f"slurm_forge: the supervisor is gone; {outcome}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#: Longer than SlurmdTimeout (300 s by default) and Slurm's next look at its nodes.
PATIENCE = timedelta(minutes=20)
_BETWEEN_S = 2.0
#: A supervisor that is only out of our reach has started ranks again by then, and written it down.
_LOOKS_FOR_SECOND = 6


def batch_node_lost(
    run: RunDirectory,
    claim: Claim,
    *,
    launch: int,
    job: str,
    slurm: Slurm,
    patience: timedelta = PATIENCE,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until Slurm does not hear from the node that the supervisor of ``claim`` was on.

    False where somebody has seen to the launch meanwhile, where the job has ended, or where that
    does not come: then the supervisor, or Slurm, does what is to be done.  ``FencedError`` once a
    newer attempt owns the run.
    """
    until = clock() + patience.total_seconds()
    looks = 0
    while clock() < until:
        Fence(run, claim.attempt, launch)()
        if run.is_done() or _has_launch_event(run, claim.attempt, launch):
            return False
        looks += 1
        is_lost = _is_lost(slurm, job, claim.nodes[0] if claim.nodes else "")
        if is_lost is False or (is_lost and looks >= _LOOKS_FOR_SECOND):
            return is_lost
        pause(_BETWEEN_S)
    return False


def lost_with_its_node(incident: Incident, claim: Claim) -> Incident:
    """The incident of a supervisor that is gone, where its node is, too."""
    host = claim.nodes[0]
    evidence = Evidence("scontrol", f"the node of the batch script, {host}, does not respond")
    return replace(
        incident,
        cause=Cause.NODE_FAIL,
        confidence=Confidence.LIKELY,
        hosts=(host,),
        evidence=(evidence, *incident.evidence),
    )


def _has_launch_event(run: RunDirectory, attempt: int, launch: int) -> bool:
    """Whether the supervisor, or rank 0 in its place, has said how the launch ended."""
    state = fold(read_to_fold(run))
    attempt_state = next((each for each in state.attempts if each.number == attempt), None)
    if attempt_state is None or attempt_state.ended is not None:
        return True
    return state.incident(f"{attempt}.{launch}") is not None


def _is_lost(slurm: Slurm, job: str, node: str) -> bool | None:
    """Whether the node is gone from a job that runs; None: nobody knows of it (yet)."""
    try:
        record = slurm.show_job(job)
        if record is None:
            return False
        if record.state is not JobState.RUNNING or not node:
            return False
        if record.nodelist and node not in expand_nodes(record.nodelist):
            return True
        if any(each.name == node and each.is_down for each in slurm.show_nodes([node])):
            return True
    except (ForgeError, ConfigError):
        pass  # the controller may be busy with just that
    return None
