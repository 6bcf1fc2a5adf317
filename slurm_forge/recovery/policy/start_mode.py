"""From what state a launch is started again, decided by how the last one ended."""

from __future__ import annotations

from slurm_forge.recovery.incident.launch_facts import LaunchFacts
from slurm_forge.recovery.incident.slurm_evidence import (
    failed_node,
    killed_for_memory,
)
from slurm_forge.spec.recovery import Recovery
from slurm_forge.vocabulary.decision import Decision, Start


def start_after(policy: Recovery, decision: Decision, facts: LaunchFacts) -> Start:
    """The warmest start that the launch after this decision may use; colder without agents.

    Cold if the node or its memory is in doubt: then the remains of a process there are unwanted.
    """
    ladder = policy.ladder(decision.cause)
    start = Start.WARM
    if decision.rung is not None and decision.rung < len(ladder):
        start = ladder[decision.rung].start
    doubtful = failed_node(facts) or killed_for_memory(facts) or facts.absent
    return Start.COLD if doubtful else start
