"""From a decision to what Slurm is asked for: nodes struck, others excluded, the job requeued."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.journal import fold, read_to_fold
from slurm_forge.journal.events import Note
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import Attempt
from slurm_forge.launch.attempt.attempt_loop import Requeuer
from slurm_forge.launch.conductor.job_poller import ConfigQuery
from slurm_forge.launch.nodes.excluded_nodes import (
    NodeExcluder,
    nodes_of,
    open_ledger,
    partitions_named,
)
from slurm_forge.launch.render.array_chain import (
    VIA_ARRAY,
    chain_of,
)
from slurm_forge.launch.render.save_times import lead_option, save_note_in
from slurm_forge.launch.requeue.array_chain import ChainRequeuer
from slurm_forge.launch.requeue.job_update import (
    arguments_for,
    excluded_nodes,
    update_for,
)
from slurm_forge.launch.requeue.requeue import (
    JobRequeuer,
    RequeueResult,
    StopExplainer,
)
from slurm_forge.recovery.policy.requeue_delay import (
    BeginTimes,
    shortened_begin_times,
)
from slurm_forge.slurm.client import JobUpdate, Slurm
from slurm_forge.slurm.records import JobRecord, PartitionRecord
from slurm_forge.vocabulary.decision import Decision
from slurm_forge.vocabulary.plan import RecoveryPlan

#: How long an end waits for what was asked at the beginning.
_QUERY_TIMEOUT_S = 2.0
_KILL_WAIT_TIMEOUT_S = 1.0


class SlurmRequeuer(Requeuer):
    """Brings the run of one attempt back by its job, as its decisions say.

    Node ledger, slurm.conf and partition are asked for by ``prepare``, else when they are first
    needed: in a grace time there is no time to lose.

    Args:
        attempt: The attempt.
        job_requeuer: Asks Slurm for the job (``make_job_requeuer``).
        slurm: Answers questions.
        partition: Where the job runs; None: as the job file says.
        cluster: Whose node ledger counts.
        knobs: The user's settings.
        latest: The newest record of the job.
        config: The question for slurm.conf, where others ask it as well.
    """

    def __init__(
        self,
        attempt: Attempt,
        job_requeuer: JobRequeuer,
        slurm: Slurm,
        *,
        partition: str | None,
        cluster: str | None,
        knobs: Knobs,
        latest: Callable[[], JobRecord | None],
        config: ConfigQuery | None = None,
    ) -> None:
        self._attempt = attempt
        self._job_requeuer = job_requeuer
        self._slurm = slurm
        self._nodes = attempt.claim.nodes
        self._partition = partition or attempt.file.job.resources.partition
        self._cluster = cluster
        self._knobs = knobs
        self._latest = latest
        self._node_excluder: NodeExcluder | None = None
        self._partition_nodes: frozenset[str] | None = None
        self._partitions: tuple[PartitionRecord, ...] = ()
        self._problems: list[str] = []
        self._config = config or ConfigQuery(slurm)
        self._begin_times: BeginTimes | None = None
        self._config_queried = threading.Event()
        self._query_thread: threading.Thread | None = None
        self._patience = _QUERY_TIMEOUT_S

    def prepare(self) -> None:
        """Ask in the background, when the attempt begins."""
        self._query_thread = threading.Thread(target=self._query, name="forge-ledger", daemon=True)
        self._query_thread.start()

    @property
    def kill_wait(self) -> timedelta | None:
        """slurm.conf's KillWait; None where Slurm does not say so within a moment."""
        if self._query_thread is not None:
            self._config_queried.wait(_KILL_WAIT_TIMEOUT_S)
        config = self._config.answer
        return None if config is None else config.kill_wait

    @property
    def grace_time(self) -> timedelta | None:
        """How much notice a preemption gives, as far as Slurm has said so by now.

        None where preemption goes by QOS, which has a grace time of its own.
        """
        config = self._config.answer
        if config is None or config.preempt_type != "preempt/partition_prio":
            return None
        graces = {partition.grace_time for partition in self._partitions}
        return graces.pop() if len(graces) == 1 else None

    def strike(self, decision: Decision) -> None:
        """Note in the ledger what the incident says against the nodes that it started on."""
        incident = self._attempt.state().incident(decision.incident_id)
        node_excluder = self._ledger()
        if incident is None or not incident.hosts or node_excluder is None:
            return
        struck = node_excluder.strike(incident)
        if struck is not None:
            with contextlib.suppress(OSError):
                self._attempt.journal.write(struck)

    def nodes_to_avoid(self, decision: Decision) -> frozenset[str]:
        """Nodes of the allocation that are to be left out: others must take their seats, or the
        run has to leave.
        """
        allocation = frozenset(self._nodes)
        node_excluder = self._ledger()
        struck = () if node_excluder is None else node_excluder.struck_here()
        return allocation & {*self._excluded(decision), *struck}

    def ledger_suspects(self) -> tuple[str, ...]:
        """Nodes that the ledger speaks against now, the worst first."""
        node_excluder = self._ledger()
        return () if node_excluder is None else node_excluder.nodes_to_exclude()

    def requeue(self, decision: Decision, *, urgent: bool = False) -> RequeueResult:
        """Requeue or submit a successor, with what the plan changes; raises only a fence.

        What is to be changed is worked out once the job is in the queue; ``urgent``: without
        waiting for what is not known by then.
        """
        job, record = self._attempt.file.job, self._latest()
        self._patience = 0.0 if urgent else self._patience

        def update() -> JobUpdate | None:
            plan = replace(decision.plan, exclude_nodes=self._excluded(decision))
            changes = update_for(replace(decision, plan=plan), job, record)
            return self._with_ledger_nodes(changes, plan, record)

        return self._job_requeuer.requeue(
            decision.reason,
            update,
            wait=timedelta(seconds=decision.wait_s),
            arguments=lambda: self._successor_options(update()),
            soon=self._shortened_start,
        )

    def _successor_options(self, update: JobUpdate | None) -> tuple[str, ...]:
        """Options of its sbatch: what recovery changes, and a lead by what saves have taken."""
        job, state = self._attempt.file.job, self._attempt.state()
        options = arguments_for(update, job)
        saves = save_note_in(state)
        is_our_script = state.attempts[-1].via in ("sbatch", VIA_ARRAY) if state.attempts else False
        # What can't be said to sbatch is told to scontrol, where nothing else is said to sbatch.
        if saves is None or not is_our_script or (update is not None and not options):
            return options
        limit = None if update is None else update.time_limit
        lead = lead_option(job, limit or job.resources.time, timedelta(seconds=saves.seconds))
        return options if lead is None else (*options, f"--signal={lead}")

    def _shortened_start(self) -> timedelta | None:
        """How far ahead the next start may be, while our own end is not reached yet."""
        if self._attempt.file.shorten_requeue:
            if self._query_thread is None:  # the job is requeued: there is time to ask
                with contextlib.suppress(ForgeError):
                    self._config.ask()
            self._begin_times = shortened_begin_times(
                self._config.answer, self._attempt.state().attempts
            )
        return None if self._begin_times is None else self._begin_times.if_killed

    def shorten_requeue_delay(self) -> None:
        """The very last act: nothing of ours runs any more, so the next start may come soon."""
        if self._begin_times is not None:
            self._job_requeuer.start_soon(
                self._begin_times.at_exit_after(self._job_requeuer.requeued_ago)
            )

    def hold(self, reason: str) -> RequeueResult:
        """Leave it to a person; raises only a fence."""
        return self._job_requeuer.hold(reason)

    def stay_ended(self, decision: Decision) -> None:
        """The run is neither to come back nor to be held: nothing of it is to start by itself."""
        self._job_requeuer.hold_array_tasks(decision.reason)

    def finished(self) -> None:
        """The run is finished: what of it waits in the queue is not needed any more."""
        self._job_requeuer.finished()

    def _excluded(self, decision: Decision) -> tuple[str, ...]:
        """The nodes that the plan excludes, as far as enough others are left to start on."""
        if not decision.plan.exclude_nodes:
            return ()
        self._await_query()
        return excluded_nodes(decision, self._attempt.file.job, self._partition_nodes)

    def _with_ledger_nodes(
        self, update: JobUpdate | None, plan: RecoveryPlan, record: JobRecord | None
    ) -> JobUpdate | None:
        """With what the ledger says now: also that a node may be used again."""
        node_excluder = self._ledger()
        if node_excluder is None or record is None:
            return update
        # What somebody else has the job leave out stays; None is that its list is right as it is.
        complete = node_excluder.excluded(
            record.excluded_nodes,
            also=plan.exclude_nodes,
            needed=plan.nodes and plan.nodes + self._attempt.file.job.resources.spares,
            own=fold(read_to_fold(self._attempt.run)).excluded,
        )
        update = replace(update or JobUpdate(), exclude_nodes=complete)
        return update if update.assignments() else None

    def _ledger(self) -> NodeExcluder | None:
        self._await_query()
        problems, self._problems = self._problems, []
        for problem in problems:
            sys.stderr.write(f"slurm_forge: {problem}\n")
            with contextlib.suppress(OSError):
                self._attempt.journal.write(Note(text=problem[:400]))
        return self._node_excluder

    def _await_query(self) -> None:
        # Never on this thread: Slurm may be silent, and the intent to requeue is not written yet.
        if self._query_thread is None:
            self.prepare()
        if self._query_thread is not None:
            self._query_thread.join(self._patience)
            self._patience = 0.0  # once in all

    def _query(self) -> None:
        """On a thread of its own: what it finds is told by whoever needs it."""
        attempt = self._attempt
        with contextlib.suppress(ForgeError):
            self._config.ask()
        self._config_queried.set()
        try:
            partition = self._partition
            self._partitions = (
                partitions_named(self._slurm, partition)
                if partition
                else self._slurm.show_partitions()
            )
            self._partition_nodes = nodes_of(self._partitions, partition)
            ledger = open_ledger(
                self._knobs, cluster=self._cluster, of_site=attempt.file.node_ledger
            )
            self._node_excluder = NodeExcluder(
                ledger,
                attempt.run,
                job=attempt.file.job,
                nodes=self._nodes,
                partition=self._partition_nodes,
                tell=self._problems.append,
            )
        except (OSError, ForgeError) as error:
            self._problems.append(f"the node ledger: {error}")


def make_job_requeuer(
    attempt: Attempt,
    slurm: Slurm,
    *,
    job: str,
    script: Path | None = None,
    explain: StopExplainer | None = None,
    patience: timedelta | None = None,
) -> JobRequeuer:
    """What asks Slurm for the job of an attempt: to requeue it, or to hold it.

    Args:
        attempt: The attempt.
        slurm: Asked for everything.
        job: The number of the job, with that of its array task.
        script: What a successor is submitted with, None where there is none.
        explain: Says what a stop was asked for.
        patience: For a controller that does not answer; None: as the job file says.
    """
    file = attempt.file
    chain = chain_of(job, file.job.chain, slurm)
    make = JobRequeuer if chain is None else partial(ChainRequeuer, chain=chain)
    return make(
        slurm,
        job=job,
        restart_count=attempt.claim.restart_count,
        script=script,
        journal=attempt.journal,
        fence=attempt.fence,
        successor=attempt.state().successor_of(job),
        patience=patience or file.job.recovery.limits.controller_patience,
        only_hold=file.only_hold,
        explain=explain,
    )
