"""The strikes of an incident against the nodes that it names.  Pure."""

from __future__ import annotations

from collections.abc import Collection

from slurm_forge.recovery.nodes.statements import Strike
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident

# Weights by how conclusive the evidence is.  With the threshold at 1: a report of an authority
# about a node (a driver's error text, Slurm's node failure) excludes it for about three days; an
# indication needs a second one within some days (links recover by themselves), a crash a third
# one.  Of repetitions by one run within some hours at one node only one counts: see score.
_WEIGHTS: dict[Cause, dict[Confidence, float]] = {
    Cause.GPU_ERROR: {Confidence.CERTAIN: 1.9, Confidence.LIKELY: 1.5, Confidence.GUESS: 0.5},
    Cause.NODE_FAIL: {Confidence.CERTAIN: 1.9, Confidence.LIKELY: 1.5, Confidence.GUESS: 0.5},
    Cause.HANG: {Confidence.CERTAIN: 0.75, Confidence.LIKELY: 0.75, Confidence.GUESS: 0.35},
    # Reported by the first rank that noticed, which is seldom the one to blame; certain means that
    # what a rank sent arrived changed at all others: its node computes or sends wrongly.
    Cause.NCCL_ERROR: {Confidence.CERTAIN: 1.5, Confidence.LIKELY: 0.4, Confidence.GUESS: 0.2},
    # At any time a fifth of a cluster's nodes is slower than the rest; it takes four of these.
    Cause.STRAGGLER: {Confidence.LIKELY: 0.3},
    # One copy of the weights differs from all others, which are equal.
    Cause.RANK_MISMATCH: {Confidence.CERTAIN: 0.75, Confidence.LIKELY: 0.75},
    Cause.CRASH: {Confidence.CERTAIN: 0.4, Confidence.LIKELY: 0.4, Confidence.GUESS: 0.2},
}
#: A step that was bad once and fine when it was recomputed.
_WRONG_ARITHMETIC = 0.75
#: A job with one node offers no comparison: most such failures are the program's.
_ALONE = 0.5
_OF_PROGRAMS = frozenset({Cause.HANG, Cause.NCCL_ERROR, Cause.CRASH, Cause.STRAGGLER})
#: Slurm names each node that it lost; other causes that name several mean one of them, or none.
_EACH_BY_ITSELF = frozenset({Cause.NODE_FAIL})


def strikes_of(
    incident: Incident, *, run: str, nodes: Collection[str], time: float, by: str
) -> tuple[Strike, ...]:
    """The strikes of an incident against nodes of the job, which has ``nodes`` nodes.

    Empty if its cause is no evidence against a node, if it names no node, or if it names all of
    several: then no node is to blame.
    """
    blamed = tuple(dict.fromkeys(host for host in incident.hosts if host in nodes))
    weight = _weight(incident)
    if not blamed or weight <= 0:
        return ()
    if incident.cause in _OF_PROGRAMS and len(set(nodes)) == 1:
        weight *= _ALONE
    if incident.cause not in _EACH_BY_ITSELF:
        if 1 < len(set(nodes)) == len(blamed):
            return ()
        weight /= len(blamed)
    return tuple(
        Strike(
            node=node,
            time=time,
            weight=weight,
            cause=incident.cause.value,
            run=run,
            incident_id=incident.id,
            by=by,
        )
        for node in blamed
    )


def _weight(incident: Incident) -> float:
    if incident.cause is Cause.NON_FINITE and incident.repeats is False:
        return _WRONG_ARITHMETIC
    return _WEIGHTS.get(incident.cause, {}).get(incident.confidence, 0.0)
