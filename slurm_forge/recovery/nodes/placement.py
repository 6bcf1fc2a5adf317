"""Which nodes of an allocation a launch runs on, and in which order.  Pure.

A node that the ranks were on keeps its seat (the same ranks) while it can; a seat that is empty
goes to a spare node.  The first node of an allocation carries the batch script: without it there is
no job, so it is lost only together with everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from slurm_forge.slurm.records import NodeRecord
from slurm_forge.slurm.text.nodelist import fold_nodes
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Incident

#: What lies with a node, or may: another one is worth a try where it costs nothing.
_OF_NODES = frozenset({
    Cause.NODE_FAIL, Cause.GPU_ERROR, Cause.HANG, Cause.NCCL_ERROR, Cause.CRASH, Cause.STRAGGLER,
    Cause.RANK_MISMATCH,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The nodes of a launch by rank: the first ``tasks_per_node`` ranks are on the first of them.

    ``allocation`` are all nodes of the job in Slurm's order, ``spares`` those that could take part
    and don't.
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
        """Whether ranks are on every node, as Slurm itself would put them."""
        return self.nodes == self.allocation

    @property
    def in_order(self) -> bool:
        """Whether Slurm's own order of these nodes is the order of the ranks."""
        used = frozenset(self.nodes)
        return self.nodes == tuple(node for node in self.allocation if node in used)

    def moved(self, before: Placement) -> str:
        """In words what is other than before: ``n[1,3] + spare n4``; empty where nothing is."""
        if set(self.nodes) == set(before.nodes):
            return ""
        same = [node for node in self.nodes if node in before.nodes]
        new = [node for node in self.nodes if node not in before.nodes]
        parts = ([fold_nodes(same)] if same else []) + ([f"spare {fold_nodes(new)}"] if new else [])
        return " + ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationState:
    """What is left of an allocation: ``nodes`` to be had, of which a launch takes ``wanted``.

    ``outlives``: the job goes on without a node that it loses (``sbatch --no-kill``).
    """

    nodes: tuple[str, ...]
    wanted: int
    outlives: bool = False

    def without(self, hosts: Iterable[str]) -> int:
        """How many are left without these."""
        return len(set(self.nodes) - set(hosts))

    def suffices(self, hosts: Iterable[str] = ()) -> bool:
        """Whether a launch fits on what is left without these."""
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
    """The seats of the next launch; None where fewer than ``wanted`` nodes can be used.

    ``before`` are the nodes of the launch before in the order of its ranks.  ``suspected`` may be
    used, but not while there is another; the first of them is the worst.
    """
    usable = [node for node in dict.fromkeys(allocation) if node not in unusable]
    if wanted < 1 or len(usable) < wanted:
        return None
    worst_first = [node for node in dict.fromkeys(suspected) if node in usable]
    sound = [node for node in usable if node not in worst_first]
    # Of nodes that are as good as each other those go first that ranks were on.
    seat = {node: number for number, node in enumerate(before)}
    sound.sort(key=lambda node: seat.get(node, len(seat)))
    used = frozenset([*sound, *reversed(worst_first)][:wanted])
    # Of another number of ranks none is who it was: those are in Slurm's own order again.
    earlier = before if len(before) == wanted else (None,) * wanted
    placed = [node if node in used else None for node in earlier]
    # Those that have no seat yet, in Slurm's order: at the first launch that is all of them.
    rest = iter([node for node in usable if node in used and node not in placed])
    nodes = tuple(next(rest) if node is None else node for node in placed)
    return Placement(
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        allocation=tuple(allocation),
        spares=tuple(node for node in usable if node not in used),
    )


def launch_nodes(allocation: int, spares: int, planned: int | None) -> int:
    """How many nodes a launch runs on: what the spare ones leave, or fewer, as the plan says."""
    there = max(1, allocation - spares)
    return there if planned is None else min(planned, there)


def lost_nodes(incidents: Iterable[Incident]) -> frozenset[str]:
    """Nodes that this allocation has lost, by the incidents of the attempt: they don't come back.

    One that is up again has another boot behind it, and Slurm gives it to the job no more.
    """
    return frozenset(
        host for each in incidents if each.cause is Cause.NODE_FAIL for host in each.hosts
    )


def suspected_nodes(
    incidents: Sequence[Incident], known: Iterable[str] = (), records: Iterable[NodeRecord] = ()
) -> tuple[str, ...]:
    """Nodes that something speaks against, the worst first.

    What Slurm says of them now (``records``: not responding, draining), what this attempt has seen
    of them, newest first, and what was ``known`` of them before, the worst first.
    """
    now = [each.name for each in records if each.is_down or each.is_drained]
    blamed = [
        host
        for each in reversed(incidents)
        if each.cause in _OF_NODES or each.repeats is False
        for host in each.hosts
    ]
    return tuple(dict.fromkeys([*now, *blamed, *known]))
