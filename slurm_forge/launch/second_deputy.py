"""Who stands in for a supervisor whose node is gone, in a job that goes on without its nodes.

With ``--no-kill`` Slurm takes a lost node out of the job and lets the job run, also where it is the
node of the batch script: nobody would ever start anything in it again, until its time limit.  Rank
0 is mostly on that node, too.  So the first rank of another node waits until Slurm does not hear
from the batch node any more, and then does what the deputy does.  Not longer: with the node Slurm
gives up its steps, and SIGKILL comes to all that is left of them in the same moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from slurm_forge.errors import ConfigError, ForgeError
from slurm_forge.journal import fold, read_journal
from slurm_forge.run_directory import Claim, Fence, RunDirectory
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.nodelist import expand_nodes
from slurm_forge.slurm.states import JobState
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Incident

__all__ = ["batch_node_lost", "lost_with_its_node"]

#: Longer than SlurmdTimeout (300 s by default) and Slurm's next look at its nodes.
PATIENCE = timedelta(minutes=20)
_BETWEEN_S = 2.0
#: A supervisor that is only out of our reach has started ranks again by then, and written it down.
_LOOKS = 6


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
        if run.is_done() or _told(run, claim.attempt, launch):
            return False
        looks += 1
        found = _is_lost(slurm, job, claim.nodes[0] if claim.nodes else "")
        if found is False or (found and looks >= _LOOKS):
            return found
        pause(_BETWEEN_S)
    return False


def lost_with_its_node(incident: Incident, claim: Claim) -> Incident:
    """The incident of a supervisor that is gone, where its node is, too."""
    host = claim.nodes[0]
    seen = Evidence("scontrol", f"the node of the batch script, {host}, does not respond")
    return replace(
        incident,
        cause=Cause.NODE_FAIL,
        confidence=Confidence.LIKELY,
        hosts=(host,),
        evidence=(seen, *incident.evidence),
    )


def _told(run: RunDirectory, attempt: int, launch: int) -> bool:
    """Whether the supervisor, or rank 0 in its place, has said how the launch ended."""
    state = fold(read_journal(run, thin=True)[0])
    mine = next((each for each in state.attempts if each.number == attempt), None)
    if mine is None or mine.ended is not None:
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
