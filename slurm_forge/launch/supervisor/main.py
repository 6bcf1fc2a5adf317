"""The supervisor in the batch step: the process ``supervise RUN -- PAYLOAD…``.

Starts every launch with srun, outlives every rank, and after the last one brings the run back or
lets it rest.  It is what the batch script ``exec``s, so signals for the batch step reach it and
nothing of bash's.  Imports no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slurm_forge.control import Hub
from slurm_forge.control.addresses import parse_addresses, usable_hosts
from slurm_forge.control.handshake import Credentials
from slurm_forge.control.interfaces import preferred_address
from slurm_forge.errors import ForgeError
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt_loop import FrontEnd, print_line
from slurm_forge.launch.attempt.attempt_signals import LaunchSignals
from slurm_forge.launch.attempt.failed_start import reporting_failed_start
from slurm_forge.launch.attempt.job_attempt import JobAttempt, conduct_in_job, slurm_kill_patience
from slurm_forge.launch.conductor.conductor import Conductor
from slurm_forge.launch.render.launch_command import (
    by_torchrun,
    for_torchrun,
    master_address,
    meeting_port,
    step_command,
)
from slurm_forge.launch.render.outputs import (
    RankOutput,
)
from slurm_forge.launch.render.rank_environment import for_launch
from slurm_forge.launch.render.schedule import (
    planned_end,
    timing,
)
from slurm_forge.launch.requeue.requeue import RequeueResult
from slurm_forge.launch.submit.run_arguments import run_of_arguments
from slurm_forge.launch.supervisor.job_step import (
    JobStep,
    StepOptions,
)
from slurm_forge.launch.supervisor.placement import RankPlacement
from slurm_forge.open_files import raise_open_files_limit
from slurm_forge.process import process_words
from slurm_forge.recovery import LaunchFacts
from slurm_forge.recovery.nodes.placement import Placement
from slurm_forge.recovery.policy.start_mode import start_after
from slurm_forge.run_directory import RunDirectory
from slurm_forge.signals import SignalWatcher
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.spec.recovery import trusts_process
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Decision, Start


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
    signals = LaunchSignals()
    SignalWatcher(signals.batch)
    if environment.heterogeneous:
        raise ForgeError(
            f"job {environment.job_ref} is heterogeneous: Slurm requeues all of its parts together "
            "and starts the ranks of each apart, so that a run can't be brought back from it",
            next_step="Ask for one kind of node: no hetjob, no ':' between options of sbatch.",
        )
    raise_open_files_limit(environment.ntasks or 0)  # before anything is claimed
    return conduct_in_job(
        run,
        lambda job: _Supervisor(job, payload, signals),
        environment=environment,
        variables=variables,
        slurm=slurm,
        via=via,
        signals=signals,
        script=lambda: script,
    ).code


class _Supervisor(FrontEnd):
    """Starts the launches of one attempt with srun."""

    def __init__(self, job: JobAttempt, payload: Sequence[str], signals: LaunchSignals) -> None:
        self._job = job
        self._attempt = attempt = job.attempt
        self._step_words = step_command(payload, attempt.file.srun_options)
        self._rank_placement = RankPlacement(
            attempt,
            job.environment,
            job.slurm,
            latest=lambda: job.job_poller.latest,
            ledger_suspects=job.requeuer.ledger_suspects,
        )
        self._signals = signals
        self._step = JobStep(
            str(attempt.run.path), unwinds=trusts_process(attempt.file.job.recovery)
        )
        self._start = Start.COLD
        #: Of every channel of the attempt, but for the nonce.
        self._credentials = Credentials.new()

    def launch(self) -> LaunchFacts:
        """With srun, or on the agents of the launch before."""
        placement = self._rank_placement.current or self._rank_placement.first()
        facts = self._conduct(placement)
        if not facts.finished and facts.stopped_at is None and not facts.deadline_passed:
            self._attempt.note_published()
        return replace(
            facts,
            placement=placement,
            allocation_state=self._rank_placement.allocation_state(),
            outlives_nodes=self._rank_placement.outlives,
            ranks_per_task=placement.tasks_per_node if by_torchrun(self._attempt.file) else 1,
        )

    def relaunch(self, decision: Decision, facts: LaunchFacts) -> bool:
        """On nodes of the allocation that are not to be avoided."""
        if not self._rank_placement.is_possible_in_allocation(decision):
            return False
        before = self._rank_placement.current
        placement = self._rank_placement.next(self._job.requeuer.nodes_to_avoid(decision))
        if placement is None:
            return False
        self._start = start_after(self._attempt.file.job.recovery, decision, facts)
        move_text = "" if before is None else placement.moved(before)
        if move_text:  # for whoever looks at the queue, or the log of the job
            text = f"{decision.cause.value}: relaunched on {move_text}"
            print_line(text)
            self._job.job_poller.comment(text)
        self._signals.wait(decision.wait_s)
        return True

    def output_of(self, rank: int) -> Path | None:
        """Where srun was told to write it."""
        return RankOutput(self._step_words.words, self._job.environment).path(rank)

    def clear(self) -> None:
        """The step ends."""
        self._step.leave()

    def depart(self, result: RequeueResult | None, cause: Cause) -> None:
        """Nothing of the job runs any more, so the next start may come soon."""
        if result is not None:
            self._signals.wait(slurm_kill_patience(result.outcome, cause).total_seconds())
        self._job.requeuer.shorten_requeue_delay()

    def _conduct(self, placement: Placement) -> LaunchFacts:
        file, attempt, job = self._attempt.file, self._attempt, self._job
        resources, state = file.job.resources, attempt.state()
        torchrun = by_torchrun(file)
        ranks = resources.nodes * resources.tasks_per_node
        world = ranks if torchrun else job.environment.ntasks or ranks
        tasks = None
        if not placement.everywhere or state.plan.nodes is not None:
            world = tasks = placement.tasks
        hub = Hub(
            world_size=world,
            credentials=self._credentials.with_new_nonce(),
            interface_address=preferred_address(file.socket_interface, file.host_suffix),
        )
        hub.start()
        try:
            options = StepOptions(
                payload=self._step_words.words,
                options=self._step_words.options,
                nodes=placement.nodes,
                placed=not placement.everywhere or self._rank_placement.outlives,
                tasks=tasks,
                ranks_per_task=placement.tasks_per_node if torchrun else 1,
            )
            variables = for_launch(file, job.variables, state.plan)
            if torchrun:
                variables = self._torchrun_variables(variables, placement, hub)
            # sbatch's --cpus-per-task is no longer inherited by srun since Slurm 22.05.
            if "SLURM_CPUS_PER_TASK" in variables:
                cpus = variables["SLURM_CPUS_PER_TASK"]
                variables.setdefault("SRUN_CPUS_PER_TASK", cpus)
                variables.setdefault("OMP_NUM_THREADS", cpus)
            if not self._step.can_reuse(options, world, variables):
                self._start = Start.COLD
            if self._start is Start.COLD:
                self._step.leave()  # every rank is gone before another launch begins
            attempt.next_launch(hub, placement.nodes, self._start)
            knobs = Knobs(
                channel=hub.addresses,
                nonce=hub.credentials.nonce,
                secret=hub.credentials.secret,
                attempt=attempt.claim.attempt,
                launch=attempt.launch,
                started=time.time(),
            )
            launched = self._step.begin(
                options,
                self._start,
                placement=placement,
                hosts_file=self._rank_placement.hosts_file((*options.options, *options.payload)),
                hub=hub,
                knobs=knobs,
                variables=variables,
                again=attempt.launch > 1,
            )
            conductor = Conductor(
                hub,
                journal=attempt.journal,
                job_poller=job.job_poller,
                timing=timing(
                    file.job,
                    job.job_poller.latest,
                    state=state,
                    now=time.time(),
                    end=job.environment.end_time or planned_end(file.job, state),
                    kill_wait=job.requeuer.kill_wait,
                    usual_save=file.usual_save,
                ),
                stop_file=attempt.run.stop_file,
                save_file=attempt.run.save_file,
                launched=launched,
                only_warns=attempt.only_warns,
                expected_bandwidth=file.expected_bandwidth,
            )
            with self._signals.go_to(conductor.stops):
                return conductor.watch()
        finally:
            # Else rank 0 would take the end of the channel for ours.
            hub.abort("the launch is over")
            hub.close()

    def _torchrun_variables(
        self, variables: dict[str, str], placement: Placement, hub: Hub
    ) -> dict[str, str]:
        """Where torchrun's agents of this launch meet: on the first node of the ranks."""
        file, environment = self._attempt.file, self._job.environment
        first = placement.nodes[0] if placement.nodes else None
        here = first is None or first == environment.node_name
        master = master_address(file, first, this_node=environment.node_name)
        if master is None:
            # Of this node that is known by which it is reached; Slurm's name of one may be no host.
            master = usable_hosts(parse_addresses(hub.addresses)[0])[0] if here else str(first)
        port = meeting_port(environment.job_id, self._attempt.launch + 1, here=here)
        return for_torchrun(variables, file, master=master, port=port)


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
        with reporting_failed_start(run, os.environ):
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
