"""From a decision to what Slurm is asked for: nodes struck, others left out, the ladder climbed.

The way back of an attempt that has a job of its own: a ladder, and who climbs it.

What becomes of the other tasks of a chain where one of them finds that it has nothing to do.

The last act of an attempt of whose way back nobody could be told.  Pure.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.journal import JournalWriter, fold, newest_attempt_in, read_journal
from slurm_forge.journal.codec import NO_LAUNCH
from slurm_forge.journal.events import Held, Note
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import (
    Attempt,
    Refusal,
)
from slurm_forge.launch.attempt.stop_explanation import StopExplanation
from slurm_forge.launch.conductor.job_poller import JobWatch
from slurm_forge.launch.nodes.excluded_nodes import (
    Avoider,
    names_added,
    nodes_of,
    open_ledger,
    partitions_named,
)
from slurm_forge.launch.render.array_chain import (
    VIA_ARRAY,
    chain_of,
)
from slurm_forge.launch.render.outputs import Output
from slurm_forge.launch.render.save_history import (
    lead_option,
    seen_in,
)
from slurm_forge.launch.requeue.array_chain import ChainLadder
from slurm_forge.launch.requeue.job_update import (
    arguments_for,
    update_for,
)
from slurm_forge.launch.requeue.requeue import (
    Comeback,
    Explain,
    Ladder,
    Taken,
)
from slurm_forge.recovery.nodes.exclusion import spared
from slurm_forge.recovery.policy.requeue_delay import (
    Soon,
    sooner,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import JobUpdate, Slurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.records import ConfigRecord, JobRecord, PartitionRecord
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Decision
from slurm_forge.vocabulary.plan import RecoveryPlan

#: How long an end waits for what was asked at the beginning.
_PATIENCE_S = 2.0
_MOMENT_S = 1.0


class ComingBack:
    """Brings the run of one attempt back as its decisions say.

    ``latest`` is the newest record of the job.  Node ledger and partition are asked for by
    ``prepare``, else when they are first needed: in a grace time there is no time to lose.
    """

    def __init__(
        self,
        attempt: Attempt,
        ladder: Ladder,
        slurm: Slurm,
        *,
        nodes: Sequence[str],
        partition: str | None,
        cluster: str | None,
        knobs: Knobs,
        latest: Callable[[], JobRecord | None],
    ) -> None:
        self._attempt = attempt
        self._ladder = ladder
        self._slurm = slurm
        self._nodes = tuple(nodes)
        self._partition = partition or attempt.file.job.resources.partition
        self._cluster = cluster
        self._knobs = knobs
        self._latest = latest
        self._avoider: Avoider | None = None
        self._there: frozenset[str] | None = None
        self._partitions: tuple[PartitionRecord, ...] = ()
        self._problems: list[str] = []
        self._config: ConfigRecord | None = None
        self._soon: Soon | None = None
        self._config_asked = threading.Event()
        self._asking: threading.Thread | None = None
        self._asked = False
        self._patience = _PATIENCE_S

    def prepare(self) -> None:
        """Ask in the background, when the attempt begins."""
        self._asking = threading.Thread(target=self._ask, name="forge-ledger", daemon=True)
        self._asking.start()

    @property
    def kill_wait(self) -> timedelta | None:
        """slurm.conf's KillWait; None where Slurm does not say so within a moment."""
        if self._asking is not None:
            self._config_asked.wait(_MOMENT_S)
        return None if self._config is None else self._config.kill_wait

    @property
    def grace_time(self) -> timedelta | None:
        """How much notice a preemption gives, as far as Slurm has said so by now.

        None where preemption goes by QOS, which has a grace time of its own.
        """
        if self._config is None or self._config.preempt_type != "preempt/partition_prio":
            return None
        graces = {partition.grace_time for partition in self._partitions}
        return graces.pop() if len(graces) == 1 else None

    def strike(self, decision: Decision) -> None:
        """Note in the ledger what the incident says against the nodes that it started on."""
        incident = self._attempt.state().incident(decision.incident_id)
        avoider = self._ledger()
        if incident is None or not incident.hosts or avoider is None:
            return
        struck = avoider.strike(incident)
        if struck is not None:
            with contextlib.suppress(OSError):
                self._attempt.journal.write(struck)

    def avoided(self, decision: Decision) -> frozenset[str]:
        """Nodes of the allocation that are to be left out: others must take their seats, or the
        run has to leave.
        """
        mine = frozenset(self._nodes)
        avoider = self._ledger()
        struck = () if avoider is None else avoider.struck_here()
        return mine & {*self._spared(decision), *struck}

    def doubted(self) -> tuple[str, ...]:
        """Nodes that the ledger speaks against now, the worst first."""
        avoider = self._ledger()
        return () if avoider is None else avoider.nodes_to_avoid()

    def come_back(self, decision: Decision, *, urgent: bool = False) -> Comeback:
        """Requeue or submit a successor, with what the plan changes; raises only a fence.

        What is to be changed is worked out once the job is in the queue; ``urgent``: without
        waiting for what is not known by then.
        """
        job, record = self._attempt.file.job, self._latest()
        self._patience = 0.0 if urgent else self._patience

        def update() -> JobUpdate | None:
            plan = replace(decision.plan, exclude_nodes=self._spared(decision))
            changes = update_for(replace(decision, plan=plan), job, record)
            return self._without_avoided(changes, plan, record)

        return self._ladder.climb(
            decision.reason,
            update,
            wait=timedelta(seconds=decision.wait_s),
            arguments=lambda: self._for_successor(update()),
            soon=self._sooner,
        )

    def _for_successor(self, update: JobUpdate | None) -> tuple[str, ...]:
        """Options of its sbatch: what recovery changes, and a lead by what saves have taken."""
        job, state = self._attempt.file.job, self._attempt.state()
        given = arguments_for(update, job)
        saves = seen_in(state)
        ours = state.attempts[-1].via in ("sbatch", VIA_ARRAY) if state.attempts else False
        # What can't be said to sbatch is told to scontrol, where nothing else is said to sbatch.
        if saves is None or not ours or (update is not None and not given):
            return given
        limit = None if update is None else update.time_limit
        lead = lead_option(job, limit or job.resources.time, timedelta(seconds=saves.seconds))
        return given if lead is None else (*given, f"--signal={lead}")

    def _sooner(self) -> timedelta | None:
        """How far ahead the next start may be, while our own end is not reached yet."""
        if self._attempt.file.shorten_requeue:
            self._soon = sooner(self._config, self._attempt.state().attempts)
        return None if self._soon is None else self._soon.at_worst

    def leave(self) -> None:
        """The very last act: nothing of ours runs any more, so the next start may come soon."""
        if self._soon is not None:
            self._ladder.start_soon(self._soon.at_last(self._ladder.requeued_ago))

    def hold(self, reason: str) -> Comeback:
        """Leave it to a person; raises only a fence."""
        return self._ladder.hold(reason)

    def rest(self, decision: Decision) -> None:
        """The run is neither to come back nor to be held: nothing of it is to start by itself."""
        self._ladder.rest(decision.reason)

    def finished(self) -> None:
        """The run is finished: what of it waits in the queue is not needed any more."""
        self._ladder.finished()

    def _spared(self, decision: Decision) -> tuple[str, ...]:
        """The nodes that the plan leaves out, as far as enough others are left to start on.

        A job that asks for more than the partition has would wait for ever.
        """
        plan, wanted = decision.plan, self._attempt.file.job.resources
        if not plan.exclude_nodes:
            return ()
        self._be_ready()
        # The incident's own node, which made the decision, goes before older ones.
        newest = {
            name
            for change in decision.changes
            if change.parameter == "exclude_nodes"
            for name in set(change.new.split(",")) - set(change.old.split(","))
        }
        needed = (plan.nodes or wanted.nodes) + wanted.spares
        return spared(plan.exclude_nodes, self._there, needed, tuple(newest))

    def _without_avoided(
        self, update: JobUpdate | None, plan: RecoveryPlan, record: JobRecord | None
    ) -> JobUpdate | None:
        """With what the ledger says now: also that a node may be used again."""
        avoider = self._ledger()
        if avoider is None or record is None:
            return update
        # What somebody else has the job leave out stays; None is that its list is right as it is.
        records, _ = read_journal(self._attempt.run, thin=True)
        complete = avoider.excluded(
            record.excluded_nodes,
            also=plan.exclude_nodes,
            needed=plan.nodes and plan.nodes + self._attempt.file.job.resources.spares,
            ours=names_added(records),
        )
        update = replace(update or JobUpdate(), exclude_nodes=complete)
        return update if update.assignments() else None

    def _ledger(self) -> Avoider | None:
        self._be_ready()
        problems, self._problems = self._problems, []
        for problem in problems:
            sys.stderr.write(f"slurm_forge: {problem}\n")
            with contextlib.suppress(OSError):
                self._attempt.journal.write(Note(text=problem[:400]))
        return self._avoider

    def _be_ready(self) -> None:
        if self._asking is not None:
            self._asking.join(self._patience)
            self._patience = 0.0  # once in all
        elif not self._asked:
            self._ask()

    def _ask(self) -> None:
        """On a thread of its own: what it finds is told by whoever needs it."""
        self._asked = True
        attempt = self._attempt
        with contextlib.suppress(ForgeError):
            self._config = self._slurm.show_config()
        self._config_asked.set()
        try:
            self._partitions = partitions_named(self._slurm, self._partition)
            self._there = nodes_of(self._partitions, self._partition) if self._partition else None
            ledger = open_ledger(
                self._knobs, cluster=self._cluster, of_site=attempt.file.node_ledger
            )
            self._avoider = Avoider(
                ledger,
                attempt.run,
                job=attempt.file.job,
                nodes=self._nodes,
                partition=self._there,
                tell=self._problems.append,
            )
        except (OSError, ForgeError) as error:
            self._problems.append(f"the node ledger: {error}")


def ladder_of(
    file: RunFile,
    slurm: Slurm,
    *,
    job: str,
    restart_count: int,
    script: Path | None,
    journal: JournalWriter,
    fence: Callable[[], None],
    patience: timedelta,
    successor: str | None = None,
    explain: Explain | None = None,
) -> Ladder:
    """The ladder of the run in ``file``, whose attempt is the ``job``."""
    chain = chain_of(job, file.job.chain, slurm)
    if chain is None:
        return Ladder(
            slurm,
            job=job,
            restart_count=restart_count,
            script=script,
            journal=journal,
            fence=fence,
            successor=successor,
            patience=patience,
            only_hold=file.only_hold,
            explain=explain,
        )
    return ChainLadder(
        slurm,
        chain=chain,
        job=job,
        restart_count=restart_count,
        script=script,
        journal=journal,
        fence=fence,
        successor=successor,
        patience=patience,
        only_hold=file.only_hold,
        explain=explain,
    )


def way_back(
    attempt: Attempt,
    slurm: Slurm,
    environment: SlurmEnvironment,
    watch: JobWatch,
    *,
    variables: Mapping[str, str],
    script: Path | None,
    signals: Callable[[], tuple[str, ...]],
    output: Output | None = None,
) -> ComingBack:
    """How this attempt's run comes back; the newest record of the job is what ``watch`` has seen.

    ``script`` is what a successor is submitted with, None where there is none.  ``signals`` are
    those for the batch step since the last launch ended, ``output`` is where slurmstepd writes.
    """
    ladder = ladder_of(
        attempt.file,
        slurm,
        job=environment.job_ref,
        restart_count=environment.restart_count,
        script=script,
        journal=attempt.journal,
        fence=attempt.fence,
        successor=attempt.state().successor_of(environment.job_ref),
        patience=attempt.file.job.recovery.limits.controller_patience,
        explain=StopExplanation(slurm, attempt, signals, output=output),
    )
    return ComingBack(
        attempt,
        ladder,
        slurm,
        nodes=environment.nodes,
        partition=environment.partition,
        cluster=environment.cluster_name,
        knobs=Knobs.from_environ(variables),
        latest=lambda: watch.latest,
    )


def nothing_to_do(run: RunDirectory, why: Refusal, job: str, slurm: Slurm) -> None:
    """Keep the tasks that wait from starting only to find out the same; best effort.

    Of a finished run they are cancelled; of one that rests they are held until a person wants it
    to go on.
    """
    with contextlib.suppress(ForgeError, OSError):
        chain = chain_of(job, read_run_file(run.spec_file).job.chain, slurm)
        if chain is None:
            return
        if why is Refusal.DONE:
            chain.cancel_waiting()
            return
        waiting = chain.waiting()
        if not waiting:
            return
        records, _ = read_journal(run, thin=True, fresh=True)
        state = fold(records)
        reason = state.reason or "the run rests"
        if chain.hold(waiting, reason):
            return
        number = newest_attempt_in(records)
        journal = JournalWriter(run, attempt=number, writer="supervisor", launch=NO_LAUNCH)
        journal.follow(records)
        # Whoever releases them wants it to go on: nothing else starts them.
        journal.write(Held(job=chain.array, restart_count=0, reason=reason, confirmed=True))
        journal.close()


#: What was taken for a preemption may be none: then nodes stand idle for so long.
_LONGEST = timedelta(minutes=5)


def stays_on(taken: Taken, cause: Cause) -> timedelta:
    """How long the batch step waits to be ended by Slurm before it leaves by itself.

    Slurm itself requeues what it preempts with PreemptMode=REQUEUE; up to 23.11 not where the job
    ends by itself in its grace time (tried on 22.05.8).  So where compute nodes have no scontrol,
    or it gets no answer, to be there still is what brings the run back.
    """
    return _LONGEST if taken is Taken.OPEN and cause is Cause.PREEMPTED else timedelta(0)
