"""Where the launches of one attempt run: what is known of the allocation, brought to a decision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path

from slurm_forge.errors import ConfigError, SlurmCommandError
from slurm_forge.files import make_private_directory, write_atomic
from slurm_forge.launch.attempt.attempt import (
    RELAUNCHING,
    Attempt,
)
from slurm_forge.launch.render.launch_command import by_torchrun
from slurm_forge.launch.supervisor.srun import takes_hosts_file
from slurm_forge.recovery.nodes.placement import (
    AllocationState,
    Placement,
    launch_nodes,
    lost_nodes,
    place_ranks,
    suspected_nodes,
)
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.records import JobRecord, NodeRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.nodelist import expand_nodes
from slurm_forge.vocabulary.decision import Action, Decision, Incident

#: Ranks wait for what is only worth a choice between nodes.
_PATIENCE = timedelta(seconds=3)


class RankPlacement:
    """The seats of an attempt, launch after launch.

    ``latest`` is the newest record of the job; ``ledger_suspects`` have a record of faults, the
    worst first (read only where there is a choice).
    """

    def __init__(
        self,
        attempt: Attempt,
        environment: SlurmEnvironment,
        slurm: Slurm,
        *,
        latest: Callable[[], JobRecord | None],
        ledger_suspects: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._attempt = attempt
        self._environment = environment
        self._slurm = slurm.with_timeout(_PATIENCE) if isinstance(slurm, SubprocessSlurm) else slurm
        self._latest = latest
        self._ledger_suspects = ledger_suspects
        self._allocation = environment.nodes
        job = attempt.file.job
        #: Whether the job goes on without a node that it loses.
        self.outlives = job.outlives_nodes
        self._spares = job.resources.spares
        #: Those of the launch under way, or of the last one.
        self.current: Placement | None = None

    @property
    def tasks_per_node(self) -> int:
        """As Slurm was asked to start them; submitit's executor may say otherwise than the run."""
        there, tasks = len(self._allocation), self._environment.ntasks
        if by_torchrun(self._attempt.file):  # one task of Slurm's per node, whose ranks are its own
            tasks = None
        if tasks and there and tasks % there == 0:
            return tasks // there
        return self._attempt.file.job.resources.tasks_per_node

    def first(self) -> Placement:
        """Those of the first launch.  What is doubted becomes a spare node."""
        placement = self._place(records=(), avoid=())
        # Whatever is said of them: something must be tried.
        return self._use(placement or self._all_nodes())

    def next(self, avoid: Collection[str] = ()) -> Placement | None:
        """Those of another launch, without the nodes to ``avoid``; None where too few are left."""
        placement = self._place(records=self._query_nodes() if self.outlives else (), avoid=avoid)
        return None if placement is None else self._use(placement)

    def allocation_state(self) -> AllocationState | None:
        """What is left of the allocation; None where Slurm ends a job that loses a node."""
        if not self.outlives or not self._allocation:
            return None
        lost_hosts = lost_nodes(self._incidents()) | self._nodes_out_of_job()
        usable = tuple(node for node in self._allocation if node not in lost_hosts)
        return AllocationState(nodes=usable, wanted=self._node_count(), outlives=True)

    def is_possible_in_allocation(self, decision: Decision) -> bool:
        """Whether what was decided can be done in the allocation, if its nodes suffice."""
        fewer = decision.action is Action.FEWER_NODES and self.outlives
        return decision.action in RELAUNCHING or fewer

    def hosts_file(self, words: Sequence[str]) -> Path | None:
        """A file with the node of each task, where srun needs one; ``words`` are its options."""
        placement, attempt = self.current, self._attempt
        if placement is None or not takes_hosts_file(placement, words):
            return None
        path = attempt.run.hosts_file(attempt.claim.attempt, attempt.launch)
        make_private_directory(path.parent)
        each = 1 if by_torchrun(attempt.file) else placement.tasks_per_node
        lines = [f"{node}\n" for node in placement.nodes for _ in range(each)]
        write_atomic(path, "".join(lines).encode())
        return path

    def _use(self, placement: Placement) -> Placement:
        self.current = placement
        return placement

    def _place(self, *, records: Sequence[NodeRecord], avoid: Collection[str]) -> Placement | None:
        if not self._allocation:
            return self._all_nodes()  # nobody says where we are: Slurm knows
        incidents = self._incidents()
        plan = self._attempt.state().plan
        lost_hosts = lost_nodes(incidents) | self._nodes_out_of_job()
        down = {each.name for each in records if "DOWN" in each.state}
        choice = self._node_count() < len(self._allocation)
        before = (*plan.exclude_nodes, *self._ledger_suspects()) if choice else plan.exclude_nodes
        return place_ranks(
            self._allocation,
            wanted=self._node_count(),
            tasks_per_node=self.tasks_per_node,
            before=() if self.current is None else self.current.nodes,
            unusable={*avoid, *down, *(lost_hosts if self.outlives else ())},
            suspected=suspected_nodes(incidents, before, records),
        )

    def _all_nodes(self) -> Placement:
        nodes = self._allocation[: self._node_count()]
        return Placement(
            nodes=nodes, tasks_per_node=self.tasks_per_node, allocation=self._allocation
        )

    def _node_count(self) -> int:
        planned = self._attempt.state().plan.nodes
        return launch_nodes(len(self._allocation), self._spares, planned)

    def _incidents(self) -> tuple[Incident, ...]:
        """Those of this attempt: what an allocation before it has seen is in the plan."""
        attempts = self._attempt.state().attempts
        own_attempts = [each for each in attempts if each.number == self._attempt.claim.attempt]
        return tuple(incident for each in own_attempts for _, incident in each.incidents)

    def _nodes_out_of_job(self) -> frozenset[str]:
        """Nodes that Slurm has taken out of the job meanwhile, because they are down."""
        record = self._latest()
        if record is None or record.state is not JobState.RUNNING or not record.nodelist:
            return frozenset()
        try:
            there = frozenset(expand_nodes(record.nodelist))
        except ConfigError:
            return frozenset()
        return frozenset(self._allocation) - there if there else frozenset()

    def _query_nodes(self) -> tuple[NodeRecord, ...]:
        """What Slurm says of the nodes now; nothing where it does not answer at once."""
        try:
            return self._slurm.show_nodes(self._allocation)
        except (SlurmCommandError, ConfigError):
            return ()
