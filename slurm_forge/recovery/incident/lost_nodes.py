"""Nodes that have fallen silent before Slurm reports them as down.  Pure.

Slurm takes SlurmdTimeout (300 s by default) to mark a node as down; a job that has a spare one need
not wait for that.  srun reports a rank that dies on a living node within moments, and also one that
is stopped with the others.  If srun was still waiting for all tasks of a node when it was ended,
while the tasks of the other nodes had finished, the node is gone, or as good as gone.
"""

from __future__ import annotations

import signal

from slurm_forge.recovery.incident.launch_facts import LaunchFacts
from slurm_forge.slurm.text.srun_messages import task_ends
from slurm_forge.vocabulary.cause import Cause, Evidence


def vanished(facts: LaunchFacts) -> tuple[str, ...]:
    """The nodes of the launch that are gone by all evidence, in the order of their ranks.

    Empty for a job that would not survive their loss, if srun ended by itself, and if no node was
    heard from: then the network, or this node, has failed.
    """
    placement = facts.placement
    if placement is None or not facts.outlives_nodes or facts.launcher_signal:
        return ()
    if facts.exit_status != -signal.SIGKILL:
        return ()
    if any(each.cause is not Cause.NCCL_ERROR for each in facts.failures if not each.after_loss):
        return ()  # there is a message that names the reason
    ranks = {each.rank for each in (*facts.lost, *facts.unresponsive)}
    ranks -= {each.rank for each in facts.failures}
    for end in task_ends(facts.launcher_text):
        ranks -= set(end.tasks)
    ranks -= {end.rank for end in facts.ends}  # an agent was there to report it
    per_node = placement.tasks_per_node
    silent = tuple(
        node
        for number, node in enumerate(placement.nodes)
        if ranks >= set(range(number * per_node, (number + 1) * per_node))
    )
    return silent if len(silent) < len(placement.nodes) else ()


def no_word_from(facts: LaunchFacts, nodes: tuple[str, ...]) -> Evidence:
    """The evidence for it."""
    placement = facts.placement
    assert placement is not None  # noqa: S101  nothing vanishes without
    ranks = [
        number * placement.tasks_per_node + local
        for number, node in enumerate(placement.nodes)
        if node in nodes
        for local in range(placement.tasks_per_node)
    ]
    rank_list = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    whose = f"rank{'s' if len(ranks) > 1 else ''} {rank_list}"
    text = f"{', '.join(nodes)}: no message from {whose}, while the others had ended"
    return Evidence("srun", text)
