"""What an incident says against the nodes that it names.  Pure."""

from __future__ import annotations

from collections.abc import Collection

from slurm_forge.recovery.nodes.statements import Strike
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident

# Weights by how far the evidence carries.  With the threshold at 1: what an authority said of a
# node (a driver's error text, Slurm's node failure) is enough for about three days, what points at
# one needs a second time within some days (links recover by themselves), a crash a third one.
# Of what one run repeats within some hours at one node only one counts: see weighing.
_WEIGHTS: dict[Cause, dict[Confidence, float]] = {
    Cause.GPU_ERROR: {Confidence.CERTAIN: 1.9, Confidence.LIKELY: 1.5, Confidence.GUESS: 0.5},
    Cause.NODE_FAIL: {Confidence.CERTAIN: 1.9, Confidence.LIKELY: 1.5, Confidence.GUESS: 0.5},
    Cause.HANG: {Confidence.CERTAIN: 0.75, Confidence.LIKELY: 0.75, Confidence.GUESS: 0.35},
    # Told by the first rank that noticed, which is seldom the one to blame; certain is that what a
    # rank sent arrived changed at all others: its node computes or sends what it should not.
    Cause.NCCL_ERROR: {Confidence.CERTAIN: 1.5, Confidence.LIKELY: 0.4, Confidence.GUESS: 0.2},
    # A fifth of the nodes of a cluster is slower than the rest at some time; it takes four.
    Cause.STRAGGLER: {Confidence.LIKELY: 0.3},
    # One copy of the weights differs from all others, which agree.
    Cause.RANK_MISMATCH: {Confidence.CERTAIN: 0.75, Confidence.LIKELY: 0.75},
    Cause.CRASH: {Confidence.CERTAIN: 0.4, Confidence.LIKELY: 0.4, Confidence.GUESS: 0.2},
}
#: A step that was bad once and fine when it was computed again.
_WRONG_ARITHMETIC = 0.75
#: In a job of one node there is none to compare it with: most such failures are the program's.
_ALONE = 0.5
_OF_PROGRAMS = frozenset({Cause.HANG, Cause.NCCL_ERROR, Cause.CRASH, Cause.STRAGGLER})
#: Slurm names each node that it lost; whatever else names several names one of them, or none.
_EACH_BY_ITSELF = frozenset({Cause.NODE_FAIL})


def strikes_of(
    incident: Incident, *, run: str, nodes: Collection[str], time: float, by: str
) -> tuple[Strike, ...]:
    """What an incident says against nodes of the job, of which there are ``nodes``.

    Nothing where its cause says nothing of a node, where it names none, or all of several: then it
    is not a node that is to blame.
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
