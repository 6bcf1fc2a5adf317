"""From what a launch is started again: decided from what was seen of the end of the last one."""

from __future__ import annotations

from slurm_forge.recovery.incident.launch_facts import LaunchFacts
from slurm_forge.recovery.incident.slurm_evidence import (
    failed_node,
    killed_for_memory,
)
from slurm_forge.spec.recovery import Recovery
from slurm_forge.vocabulary.decision import Decision, Start


def start_after(policy: Recovery, decision: Decision, facts: LaunchFacts) -> Start:
    """How the launch behind this decision may start at best; colder where agents don't stand.

    Cold where the node or its memory is in doubt: what is left of a process there is what is not
    wanted.
    """
    ladder = policy.ladder(decision.cause)
    start = Start.WARM
    if decision.rung is not None and decision.rung < len(ladder):
        start = ladder[decision.rung].start
    doubtful = failed_node(facts) or killed_for_memory(facts) or facts.absent
    return Start.COLD if doubtful else start
