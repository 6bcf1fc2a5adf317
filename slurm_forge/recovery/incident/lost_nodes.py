"""Nodes of which nothing is heard any more, before Slurm has given them up.  Pure.

Slurm takes SlurmdTimeout (300 s by default) to say that a node is down; a job that has a spare one
need not wait for that.  A rank that dies on a node that lives is reported by srun within moments,
and so is one that is stopped with the others.  Where srun still waited for all tasks of a node when
it was ended, while those of the others had come to their end, the node is gone, or as good as gone.
"""

from __future__ import annotations

import signal

from slurm_forge.recovery.incident.launch_facts import LaunchFacts
from slurm_forge.slurm.text.srun_messages import task_ends
from slurm_forge.vocabulary.cause import Cause, Evidence


def vanished(facts: LaunchFacts) -> tuple[str, ...]:
    """The nodes of the launch that are gone by all that was seen, in the order of their ranks.

    Empty for a job that would not outlive them, where srun ended by itself, and where nothing was
    heard of any node: then it is the way to them, or this one.
    """
    placement = facts.placement
    if placement is None or not facts.outlives_nodes or facts.launcher_signal:
        return ()
    if facts.exit_status != -signal.SIGKILL:
        return ()
    if any(each.cause is not Cause.NCCL_ERROR for each in facts.failures if not each.after_loss):
        return ()  # somebody said what it was
    ranks = {each.rank for each in (*facts.lost, *facts.unresponsive)}
    ranks -= {each.rank for each in facts.failures}
    for end in task_ends(facts.launcher_text):
        ranks -= set(end.tasks)
    ranks -= {end.rank for end in facts.ends}  # an agent was there to tell of it
    per_node = placement.tasks_per_node
    silent = tuple(
        node
        for number, node in enumerate(placement.nodes)
        if ranks >= set(range(number * per_node, (number + 1) * per_node))
    )
    return silent if len(silent) < len(placement.nodes) else ()


def no_word_from(facts: LaunchFacts, nodes: tuple[str, ...]) -> Evidence:
    """What speaks for it."""
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
