"""The supervisor in the batch step: the process ``supervise RUN -- PAYLOAD…``.

Starts every launch with srun, outlives every rank, and after the last one brings the run back or
lets it rest.  It is what the batch script ``exec``s, so signals for the batch step reach it and
nothing of bash's.  Imports no torch.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from slurm_forge.control import Hub
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.interfaces import preferred_address
from slurm_forge.errors import FencedError, ForgeError, RunDirectoryError
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import (
    REQUEUEING,
    TAKEN_OVER,
    Attempt,
    Refusal,
    begin,
)
from slurm_forge.launch.attempt.attempt_signals import BatchSignals
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
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.conductor.job_poller import JobWatch
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.launch.render.launch_command import (
    by_torchrun,
    for_torchrun,
    master_address,
    meeting_port,
    step_of,
)
from slurm_forge.launch.render.outputs import (
    RankOutput,
    own_output,
)
from slurm_forge.launch.render.rank_environment import for_launch
from slurm_forge.launch.render.schedule import (
    planned_end,
    timing,
)
from slurm_forge.launch.submit.run_arguments import run_of_arguments
from slurm_forge.launch.supervisor.job_step import (
    StandingStep,
    StepOptions,
)
from slurm_forge.launch.supervisor.placement import Seating
from slurm_forge.process import process_words
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.incident.slurm_evidence import is_ending
from slurm_forge.recovery.nodes.placement import Seats
from slurm_forge.recovery.policy.start_mode import start_after
from slurm_forge.run_directory import RunDirectory
from slurm_forge.signals import SignalWatcher
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.spec.recovery import trusts_process
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision, Start

__all__ = ["main", "supervise"]

_LONGEST_PAUSE_S = 120.0
#: Time is short, and no node is to blame.
_URGENT = frozenset({Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.ADMIN_REQUEUE})


def supervise(
    run: RunDirectory,
    payload: Sequence[str],
    *,
    environment: SlurmEnvironment,
    variables: dict[str, str],
    slurm: Slurm,
    via: str,
    script: Path | None = None,
) -> int:
    """Conduct one attempt from the batch step; the exit status for Slurm.

    0 also for a run that is held: what it waits for is a person, and its verdict is in the journal.
    """
    current = BatchSignals()
    SignalWatcher(current.signal)
    if environment.heterogeneous:
        raise ForgeError(
            f"job {environment.job_ref} is heterogeneous: Slurm requeues all of its parts together "
            "and starts the ranks of each apart, so that a run can't be brought back from it",
            next_step="Ask for one kind of node: no hetjob, no ':' between options of sbatch.",
        )
    try:
        begun = begin(
            run,
            job=environment.job_ref,
            restart_count=environment.restart_count,
            nodes=environment.nodes,
            via=via,
            slurm=slurm,
        )
    except FencedError as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        return 0
    except OSError as error:
        return _stranded(slurm, environment, via, error, current)
    if isinstance(begun, Refusal):
        sys.stderr.write(f"slurm_forge: {run.name}: nothing to do ({begun.value})\n")
        nothing_to_do(run, begun, environment.job_ref, slurm)
        return 0
    note_unrecognized(begun, environment.unrecognized)
    watch = JobWatch(slurm, environment.job_ref)
    try:
        back = way_back(
            begun,
            slurm,
            environment,
            watch,
            variables=variables,
            script=script,
            signals=lambda: current.early,
            output=own_output(),
        )
        back.prepare()
        return _Supervisor(
            begun, payload, environment, variables, watch, back, current, slurm
        ).run()
    except FencedError as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        begun.end(TAKEN_OVER)
        return 0
    except OSError as error:
        return _stranded(slurm, environment, via, error, current)
    finally:
        watch.close()


def _stranded(
    slurm: Slurm, environment: SlurmEnvironment, via: str, error: OSError, current: BatchSignals
) -> int:
    """The run directory can't be used: nothing of the run can be known, or written down."""
    done = leave_to_slurm(
        slurm,
        environment.job_ref,
        f"the run directory: {error}",
        restart_count=environment.restart_count,
        in_chain=via == VIA_ARRAY,
        signalled=lambda: current.terminated,
    )
    sys.stderr.write(f"slurm_forge: the run directory can't be used ({error}): {done}\n")
    return 1


class _Supervisor:
    """Launch after launch inside one attempt."""

    def __init__(
        self,
        attempt: Attempt,
        payload: Sequence[str],
        environment: SlurmEnvironment,
        variables: dict[str, str],
        watch: JobWatch,
        back: ComingBack,
        current: BatchSignals,
        slurm: Slurm,
    ) -> None:
        self._attempt = attempt
        self._slurm = slurm
        self._step_words = step_of(payload, attempt.file.srun_options)
        self._environment = environment
        self._variables = variables
        self._watch = watch
        self._back = back
        self._seating = Seating(
            attempt,
            environment,
            slurm,
            latest=lambda: watch.latest,
            known=back.doubted,
        )
        self._current = current
        self._launched_at = datetime.now(timezone.utc)
        #: What earlier starts of the job have left in the same file says nothing of this one.
        self._own_output = own_output()
        self._step = StandingStep(
            str(attempt.run.path), unwinds=trusts_process(attempt.file.job.recovery)
        )
        self._start = Start.COLD

    def run(self) -> int:
        if self._attempt.verdict is not None:
            return self._go(self._attempt.verdict)
        seats = self._seating.first()
        while True:
            facts = self._launch(seats)
            decision = self._concluded(facts, seats)
            if decision is None:
                self._step.leave()
                self._back.finished()
                self._attempt.end("finished")
                return 0
            staying = self._seating.stays(decision) and _may_stay(facts)
            if decision.cause not in _URGENT:
                self._back.strike(decision)
            long = decision.wait_s > _LONGEST_PAUSE_S  # the queue is cheaper to wait in
            again = None
            if staying and not long:
                again = self._seating.next(self._back.avoided(decision))
            if again is not None:
                self._start = start_after(self._attempt.file.job.recovery, decision, facts)
                self._tell(again.moved(seats), decision)
                self._current.wait(decision.wait_s)
                seats = again
                continue
            return self._go(decision)

    def _tell(self, moved: str, decision: Decision) -> None:
        """Where the ranks are now, for whoever looks at the queue or the log of the job."""
        if moved:
            text = f"{decision.cause.value}: relaunched on {moved}"
            sys.stderr.write(f"slurm_forge: {text}\n")
            self._watch.comment(text)

    def _concluded(self, facts: LaunchFacts, seats: Seats) -> Decision | None:
        """What is done about it.  Where nothing can be written down, a person has to see to it."""
        attempt = self._attempt
        if self._watch.latest is not None:
            note_unrecognized(attempt, self._watch.latest.unrecognized)
        try:
            if not facts.finished and facts.stopped_at is None and not facts.deadline_passed:
                attempt.note_published()
            return attempt.conclude(
                gathered(
                    replace(
                        facts,
                        seats=seats,
                        outlives_nodes=self._seating.outlives,
                        grace=self._back.grace_time,
                        ranks_per_task=seats.tasks_per_node
                        if by_torchrun(self._attempt.file)
                        else 1,
                    ),
                    run=attempt.run,
                    attempt=attempt.claim.attempt,
                    launch=attempt.launch,
                    job=self._environment.job_ref,
                    slurm=self._slurm,
                    output_of=RankOutput(self._step_words.words, self._environment).path,
                    batch_output=self._own_output,
                    restart_count=self._environment.restart_count,
                    since=self._launched_at,
                ),
                room=self._seating.room(),
            )
        except RunDirectoryError as error:
            self._back.hold(error.message)
            raise

    def _launch(self, seats: Seats) -> LaunchFacts:
        file, attempt = self._attempt.file, self._attempt
        wanted, state = file.job.resources, attempt.state()
        torchrun = by_torchrun(file)
        asked = wanted.nodes * wanted.tasks_per_node
        world = asked if torchrun else self._environment.ntasks or asked
        tasks = None
        if not seats.everywhere or state.plan.nodes is not None:
            world = tasks = seats.tasks
        hub = Hub(
            world_size=world,
            nonce=secrets.token_hex(16),
            interface_address=preferred_address(file.socket_interface, file.host_suffix),
        )
        hub.start()
        try:
            options = StepOptions(
                payload=self._step_words.words,
                options=self._step_words.options,
                nodes=seats.nodes,
                placed=not seats.everywhere or self._seating.outlives,
                tasks=tasks,
                ranks_per_task=seats.tasks_per_node if torchrun else 1,
            )
            variables = for_launch(file, self._variables, state.plan)
            if torchrun:
                variables = self._meeting(variables, seats, hub)
            # sbatch's --cpus-per-task is no longer inherited by srun since Slurm 22.05.
            if "SLURM_CPUS_PER_TASK" in variables:
                cpus = variables["SLURM_CPUS_PER_TASK"]
                variables.setdefault("SRUN_CPUS_PER_TASK", cpus)
                variables.setdefault("OMP_NUM_THREADS", cpus)
            if not self._step.stands_for(options, world, variables):
                self._start = Start.COLD
            if self._start is Start.COLD:
                self._step.leave()  # every rank is gone before another launch begins
            attempt.next_launch(hub, seats.nodes, self._start)
            knobs = Knobs(
                channel=hub.addresses,
                nonce=hub.nonce,
                attempt=attempt.claim.attempt,
                launch=attempt.launch,
                started=time.time(),
            )
            self._launched_at = datetime.now(timezone.utc)
            launched = self._step.begin(
                options,
                self._start,
                seats=seats,
                seat_file=self._seating.seat_file((*options.options, *options.payload)),
                hub=hub,
                knobs=knobs,
                variables=variables,
                again=attempt.launch > 1,
            )
            conductor = Conductor(
                hub,
                journal=attempt.journal,
                watch=self._watch,
                timing=timing(
                    file.job,
                    self._watch.latest,
                    state=state,
                    now=time.time(),
                    end=self._environment.end_time or planned_end(file.job, state),
                    kill_wait=self._back.kill_wait,
                    usual_save=file.usual_save,
                ),
                stop_file=attempt.run.stop_file,
                save_file=attempt.run.save_file,
                launched=launched,
                only_warns=attempt.only_warns,
                expected_bandwidth=file.expected_bandwidth,
            )
            self._current.begin(conductor)
            return conductor.watch()
        finally:
            self._current.end()
            # Else rank 0 would take the end of the channel for ours.
            hub.abort("the launch is over")
            hub.close()

    def _meeting(self, variables: dict[str, str], seats: Seats, hub: Hub) -> dict[str, str]:
        """Where torchrun's agents of this launch meet: on the first node of the ranks."""
        file, environment = self._attempt.file, self._environment
        first = seats.nodes[0] if seats.nodes else None
        here = first is None or first == environment.node_name
        master = master_address(file, first, this_node=environment.node_name)
        if master is None:
            # Of this node that is known by which it is reached; Slurm's name of one may be no host.
            master = parse_addresses(hub.addresses)[0][0] if here else str(first)
        port = meeting_port(environment.job_id, self._attempt.launch + 1, here=here)
        return for_torchrun(variables, file, master=master, port=port)

    def _go(self, decision: Decision) -> int:
        """Give the nodes back: requeue first where time is short, then end what is left."""
        outcome, stay = decision.action.value, timedelta(0)
        if decision.action in REQUEUEING:
            urgent = decision.cause in _URGENT
            taken = self._back.come_back(decision, urgent=urgent).taken
            outcome, stay = taken.value, stays_on(taken, decision.cause)
        elif decision.action is Action.HOLD:
            outcome = self._back.hold(decision.reason).taken.value
        else:
            self._back.rest(decision)
            outcome = "raised" if decision.action is Action.RAISE else outcome
        self._step.leave()
        self._attempt.end(outcome)
        sys.stderr.write(f"slurm_forge: {decision.reason}: {outcome}\n")
        self._back.leave()
        self._current.wait(stay.total_seconds())
        return 1 if decision.action is Action.RAISE else 0


def _may_stay(facts: LaunchFacts) -> bool:
    """Whether the allocation is still ours to start ranks in.

    A signal that only ranks have heard proves nothing: srun sends it to the others when one fails.
    """
    wanted = facts.batch_signals or facts.due_time_limit or facts.stop_file
    return not wanted and not is_ending(facts)


def main(argv: Sequence[str] | None = None) -> int:
    """``RUN [--via NAME] [--script FILE] -- PAYLOAD…``; the default payload is our worker.

    A payload that begins with srun has all of its options in it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    payload: list[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, payload = arguments[:split], arguments[split + 1 :]
    try:
        run, via, script = run_of_arguments(arguments)
        with telling_why_not_started(run, os.environ):
            environment = SlurmEnvironment.from_environ(os.environ)
            if environment is None:
                raise ForgeError(
                    "the supervisor runs inside a Slurm job",
                    next_step="Use slurm-forge submit; without Slurm, slurm-forge run.",
                )
            if not payload:
                payload = [sys.executable, "-u", *process_words("worker", str(run.path))]
            return supervise(
                run,
                payload,
                environment=environment,
                variables=dict(os.environ),
                slurm=SubprocessSlurm.of_this_process(),
                via=via,
                script=script,
            )
    except ForgeError as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
