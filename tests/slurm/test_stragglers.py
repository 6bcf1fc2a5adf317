"""A slow node on a real Slurm: the run saves, leaves it out, and finishes all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.journal.events import AttemptStarted, NodesStruck, StragglerSeen
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action
from tests.jobs import consumed
from tests.slurm.harness import submit

pytestmark = [pytest.mark.slurm]

STEPS = 300
LADDER = {"straggler": [{"do": "requeue", "times": 1, "exclude_node": True}]}


@pytest.mark.slow
def test_a_slow_node_is_left_out_where_the_job_file_says_so(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    plain = submit(
        slurm, tmp_path / "plain", name="plain", partition="normal", nodes=2, args={"steps": STEPS}
    )
    plain.wait_finished()
    watched = submit(
        slurm,
        tmp_path / "slow",
        name="slow",
        partition="normal",
        nodes=2,
        args={"steps": STEPS, "pace": 0.05, "later_pace": 0.0},
        probe={"every": "1s"},
        recovery=LADDER,
        inject=["slow@40x100000:rank1:attempt=1:factor=6:node"],
    )
    state = watched.wait_finished(240)

    first, _ = state.attempts
    slow = first.nodes[1]
    ((_, seen),) = watched.events(StragglerSeen)
    assert isinstance(seen, StragglerSeen)
    assert (seen.host, seen.ranks, seen.why) == (slow, (1,), "node")
    (_, incident), *_ = first.incidents
    assert (incident.cause, incident.confidence) == (Cause.STRAGGLER, Confidence.LIKELY)
    assert incident.hosts == (slow,)
    assert [decision.action for _, decision in first.decisions] == [Action.REQUEUE]
    assert not watched.events(NodesStruck)  # a rehearsal convicts no node
    second = watched.events(AttemptStarted)[1][1]
    assert isinstance(second, AttemptStarted)
    assert slow not in second.nodes
    # The ranks had saved before they went: nothing was trained twice.
    assert first.checkpoints[-1][1].reason == "stop"
    assert (watched.digest(), consumed(watched.run.path)) == (
        plain.digest(),
        consumed(plain.run.path),
    )
