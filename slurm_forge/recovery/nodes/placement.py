"""Which nodes of an allocation a launch runs on, and in which order.  Pure.

A node that ranks were on keeps its seat (the same ranks) while it can; an empty seat goes to a
spare node.  The first node of an allocation runs the batch script: without it there is no job, so
its loss is the loss of everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from slurm_forge.slurm.records import NodeRecord
from slurm_forge.slurm.text.nodelist import fold_nodes
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Incident

#: Causes that lie, or may lie, with a node: another one is worth a try if it costs nothing.
_OF_NODES = frozenset({
    Cause.NODE_FAIL, Cause.GPU_ERROR, Cause.HANG, Cause.NCCL_ERROR, Cause.CRASH, Cause.STRAGGLER,
    Cause.RANK_MISMATCH,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The nodes of a launch by rank: the first ``tasks_per_node`` ranks are on the first of them.

    ``allocation`` are all nodes of the job in Slurm's order, ``spares`` those that could take part
    but don't.
    """

    nodes: tuple[str, ...]
    tasks_per_node: int
    allocation: tuple[str, ...]
    spares: tuple[str, ...] = ()

    @property
    def tasks(self) -> int:
        """The world size of the launch."""
        return len(self.nodes) * self.tasks_per_node

    @property
    def everywhere(self) -> bool:
        """Whether ranks are on every node, as Slurm itself would place them."""
        return self.nodes == self.allocation

    @property
    def in_order(self) -> bool:
        """Whether Slurm's own order of these nodes is the order of the ranks."""
        used = frozenset(self.nodes)
        return self.nodes == tuple(node for node in self.allocation if node in used)

    def moved(self, before: Placement) -> str:
        """The changes as text: ``n[1,3] + spare n4``; empty if there are none."""
        if set(self.nodes) == set(before.nodes):
            return ""
        same = [node for node in self.nodes if node in before.nodes]
        new = [node for node in self.nodes if node not in before.nodes]
        parts = ([fold_nodes(same)] if same else []) + ([f"spare {fold_nodes(new)}"] if new else [])
        return " + ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationState:
    """What is left of an allocation: usable ``nodes``, of which a launch takes ``wanted``.

    ``outlives``: the job survives the loss of a node (``sbatch --no-kill``).
    """

    nodes: tuple[str, ...]
    wanted: int
    outlives: bool = False

    def without(self, hosts: Iterable[str]) -> int:
        """How many nodes are left without these."""
        return len(set(self.nodes) - set(hosts))

    def suffices(self, hosts: Iterable[str] = ()) -> bool:
        """Whether a launch fits on the nodes that are left without these."""
        return self.without(hosts) >= self.wanted


def place_ranks(
    allocation: Sequence[str],
    *,
    wanted: int,
    tasks_per_node: int,
    before: Sequence[str] = (),
    unusable: Collection[str] = (),
    suspected: Sequence[str] = (),
) -> Placement | None:
    """The seats of the next launch; None if fewer than ``wanted`` nodes can be used.

    ``before`` are the nodes of the previous launch in the order of its ranks.  ``suspected`` nodes
    are used only if there is no other; the first of them is the worst.
    """
    usable = [node for node in dict.fromkeys(allocation) if node not in unusable]
    if wanted < 1 or len(usable) < wanted:
        return None
    worst_first = [node for node in dict.fromkeys(suspected) if node in usable]
    sound = [node for node in usable if node not in worst_first]
    # Among equally good nodes, those that ranks were on come first.
    seat = {node: number for number, node in enumerate(before)}
    sound.sort(key=lambda node: seat.get(node, len(seat)))
    used = frozenset([*sound, *reversed(worst_first)][:wanted])
    # With another number of ranks no rank keeps its identity: Slurm's own order applies again.
    earlier = before if len(before) == wanted else (None,) * wanted
    placed = [node if node in used else None for node in earlier]
    # Nodes without a seat yet, in Slurm's order: at the first launch, all of them.
    rest = iter([node for node in usable if node in used and node not in placed])
    nodes = tuple(next(rest) if node is None else node for node in placed)
    return Placement(
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        allocation=tuple(allocation),
        spares=tuple(node for node in usable if node not in used),
    )


def launch_nodes(allocation: int, spares: int, planned: int | None) -> int:
    """How many nodes a launch runs on: all but the spare ones, or fewer if the plan says so."""
    there = max(1, allocation - spares)
    return there if planned is None else min(planned, there)


def lost_nodes(incidents: Iterable[Incident]) -> frozenset[str]:
    """Nodes that this allocation has lost, by the incidents of the attempt: they don't come back.

    A node that is up again has rebooted, and Slurm does not return it to the job.
    """
    return frozenset(
        host for each in incidents if each.cause is Cause.NODE_FAIL for host in each.hosts
    )


def suspected_nodes(
    incidents: Sequence[Incident], known: Iterable[str] = (), records: Iterable[NodeRecord] = ()
) -> tuple[str, ...]:
    """Nodes with evidence against them, the worst first.

    Slurm's present records (``records``: not responding, draining), this attempt's own evidence,
    newest first, and what was ``known`` of them before, the worst first.
    """
    now = [each.name for each in records if each.is_down or each.is_drained]
    blamed = [
        host
        for each in reversed(incidents)
        if each.cause in _OF_NODES or each.repeats is False
        for host in each.hosts
    ]
    return tuple(dict.fromkeys([*now, *blamed, *known]))
