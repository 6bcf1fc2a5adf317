"""Runs that are preempted, cut off, cancelled or hit by a fault on a real Slurm, and finish."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from slurm_forge.journal import RunStatus
from slurm_forge.journal.events import CheckpointCommitted, Note, NoticeSeen, Resumed
from slurm_forge.launch.requeue.reconcile import reconcile
from slurm_forge.site.model import Site
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action
from tests.jobs import consumed
from tests.slurm.harness import (
    Watched,
    Way,
    environment,
    left_in_peace,
    left_of_limit,
    submit,
)

pytestmark = [pytest.mark.slurm]

STEPS = 120
#: Seconds per step: long enough to be preempted in the middle, short enough for a test.
PACE = {"steps": STEPS, "pace": 0.05}


class Uninterrupted(dict[tuple[str, int], tuple[str, dict]]):
    """Digest and samples of the run that nothing happened to, per kind of parallelism and nodes."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders = folders

    def __missing__(self, which: tuple[str, int]) -> tuple[str, dict]:
        parallel, nodes = which
        folder = self.folders.mktemp(f"reference-{parallel}-{nodes}")
        args = {"steps": STEPS, "parallel": parallel}
        self[which] = left_in_peace(folder, ranks=nodes, args=args)
        return self[which]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    return Uninterrupted(tmp_path_factory)


def causes(watched: Watched) -> list[Cause]:
    return [i.cause for a in watched.state.attempts for _, i in a.incidents]


def repeated_steps(watched: Watched) -> int:
    """Steps that were computed more than once."""
    rows = [
        line
        for file in (watched.run.path / "samples").glob("*-r0.jsonl")
        for line in file.read_text().splitlines()
    ]
    return len(rows) - len(consumed(watched.run.path))


@pytest.mark.parametrize(
    ("way", "parallel", "nodes"),
    [
        pytest.param(Way.TEMPLATE, "ddp", 2, marks=[pytest.mark.versions, pytest.mark.slow]),
        pytest.param(Way.STOCK, "ddp", 2, marks=pytest.mark.slow),
        pytest.param(Way.FORGE, "fsdp2", 4, marks=pytest.mark.slow),
        pytest.param(Way.TEMPLATE, "fsdp2", 4, marks=pytest.mark.slow),
        pytest.param(Way.FORGE, "ddp", 4, marks=pytest.mark.slow),
        pytest.param(Way.STOCK, "fsdp2", 4, marks=pytest.mark.slow),
    ],
)
def test_preempted_with_grace_loses_nothing(
    slurm: SlurmCluster,
    tmp_path: Path,
    uninterrupted: Uninterrupted,
    way: Way,
    parallel: str,
    nodes: int,
) -> None:
    reference, samples = uninterrupted[parallel, nodes]
    watched = submit(
        slurm,
        tmp_path,
        name="preempted",
        way=way,
        nodes=nodes,
        args={**PACE, "parallel": parallel},
    )
    watched.wait_step(25)
    slurm.preempt(watched.job)
    state = watched.wait_finished()

    assert len(state.attempts) == 2
    incident = state.attempts[0].incidents[0][1]
    assert (incident.cause, incident.confidence) == (Cause.PREEMPTED, Confidence.CERTAIN)
    stopped = state.attempts[0].checkpoints[-1][1]
    assert incident.step == stopped.step, "what was stopped at is not what was committed"
    assert repeated_steps(watched) == 0
    assert consumed(watched.run.path) == samples
    assert watched.digest() == reference
    notice = watched.events(NoticeSeen)[0][0]
    committed = next(t for t, e in watched.events(CheckpointCommitted) if e.step == stopped.step)
    assert committed - notice < 10, "not within the grace period"
    if way is Way.FORGE:
        with environment(slurm):
            slurm.wait_for(lambda: watched.handle.done(force_check=True), 30, "submitit's result")
            assert all("finished" in result for result in watched.handle.results())


@pytest.mark.slow
def test_ten_preemptions_in_a_row(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    reference, samples = uninterrupted["ddp", 4]
    watched = submit(slurm, tmp_path, name="often", way=Way.FORGE, args={**PACE, "pace": 0.2})
    for number in range(1, 11):
        watched.wait_step((watched.state.committed_step or 0) + 1, attempt=number)
        slurm.preempt(watched.job)
        watched.wait(lambda s, n=number: len(s.attempts) > n, 60, f"attempt {number + 1}")
    state = watched.wait_finished()
    assert len(state.attempts) == 11
    assert set(causes(watched)) == {Cause.PREEMPTED}
    assert consumed(watched.run.path) == samples
    assert repeated_steps(watched) == 0
    assert watched.digest() == reference


@pytest.mark.slow
def test_preempted_without_grace_loses_at_most_one_interval(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    reference, samples = uninterrupted["ddp", 2]
    # A step that outlasts KillWait: the signal comes, and no commit can.
    watched = submit(
        slurm,
        tmp_path,
        nodes=2,
        name="nograce",
        partition="preempt-nograce",
        args={**PACE, "long_step": 30, "long_seconds": 60},
    )
    watched.wait_step(20)
    watched.wait(lambda s: s.committed_step == 20, 30, "the periodic checkpoint")
    slurm.preempt(watched.job)
    watched.wait_finished()
    assert repeated_steps(watched) <= 20
    assert consumed(watched.run.path) == samples
    assert watched.digest() == reference


def test_time_limit_shorter_than_the_training(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    reference, samples = uninterrupted["ddp", 2]
    watched = submit(
        slurm,
        tmp_path,
        nodes=2,
        name="limited",
        partition="normal",
        minutes=1,
        # Cut off after 42 s of its minute: a training of 48 s is not through by then.
        args={**PACE, "pace": 0.4},
        lead="18s",
        # On a busy machine whole attempts may pass before it trains.
        recovery={"limits": {"attempts_without_progress": 20}},
    )
    state = watched.wait_finished(240)
    assert len(state.attempts) >= 2
    assert set(causes(watched)) == {Cause.TIME_LIMIT}
    assert repeated_steps(watched) == 0
    assert consumed(watched.run.path) == samples
    assert watched.digest() == reference


@pytest.mark.slow
def test_a_short_limit_is_used_to_its_end_though_slurm_warns_long_before(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm sends ``--signal=USR1@30`` 30 to 90 s before the end, and the lead is 24 s."""
    watched = submit(
        slurm,
        tmp_path,
        nodes=2,
        name="warned",
        partition="normal",
        minutes=2,
        args={"steps": 560, "pace": 0.2, "later_pace": 0.01},
        site=Site.model_validate({"name": "warning", "sbatch_options": ["--signal=USR1@30"]}),
    )
    state = watched.wait_finished(240)
    assert len(state.attempts) == 2 and state.attempts[0].outcome == "requeued"
    incident = state.attempts[0].incidents[0][1]
    assert (incident.cause, incident.confidence) == (Cause.TIME_LIMIT, Confidence.CERTAIN)
    warned = [
        (at, e.text) for at, e in watched.events(Note) if "warning of the time limit" in e.text
    ]
    ((stopped, notice),) = watched.events(NoticeSeen)
    assert (notice.what, notice.source) == ("end of the time limit", "clock")
    assert warned[0][0] < stopped
    assert left_of_limit(warned[0][1], at=stopped) <= 24 + 2, "a part of the limit was given away"
    assert repeated_steps(watched) == 0


@pytest.mark.slow
def test_step_longer_than_the_lead_time_is_requeued_all_the_same(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    reference, samples = uninterrupted["ddp", 4]
    watched = submit(
        slurm,
        tmp_path,
        name="longstep",
        partition="normal",
        minutes=1,
        lead="8s",
        args={**PACE, "long_step": 45, "long_seconds": 300},
        watchdog={"enabled": False},  # to which such a step is a hang
    )
    state = watched.wait_finished(240)
    assert len(state.attempts) == 2
    assert state.attempts[0].requeues, "nobody requeued it"
    resumed = watched.events(Resumed)[1][1]
    assert resumed.step == 40
    assert consumed(watched.run.path) == samples
    assert watched.digest() == reference


@pytest.mark.slow
def test_scancel_stays_cancelled(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = submit(slurm, tmp_path, name="cancelled", args=PACE, nodes=2)
    watched.wait_step(5)
    slurm.run("scancel", watched.job)
    slurm.wait_state(watched.job, ["CANCELLED"], 30)
    watched.wait(lambda s: s.status is RunStatus.CANCELLED, 30, "the journal to say so")
    assert not watched.state.attempts[0].requeues
    assert slurm.run("squeue", "-h", "-j", watched.job).stdout.strip() == ""


def test_finished_run_requeued_by_an_administrator_does_nothing(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    watched = submit(slurm, tmp_path, name="twice", args={"steps": 10}, nodes=2)
    watched.wait_finished()
    slurm.wait_state(watched.job, ["COMPLETED"], 30)
    before = watched.digest()
    slurm.run("scontrol", "requeue", watched.job)
    slurm.wait_for(
        lambda: (
            slurm.job(watched.job).restarts == 1 and slurm.job(watched.job).state == "COMPLETED"
        ),
        60,
        "the second start to end",
    )
    assert slurm.job(watched.job).field("ExitCode") == "0:0"
    assert len(watched.state.attempts) == 1
    assert watched.digest() == before


@pytest.mark.slow
def test_nan_on_one_rank_of_four(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """A gradient goes bad once, then three batches are poisoned: cured without a restart."""
    _, samples = uninterrupted["ddp", 4]
    watched = submit(
        slurm,
        tmp_path,
        name="nan",
        partition="normal",
        args={"steps": STEPS},
        inject=["nan@15:rank2", "nan:samples=800-847"],
    )
    state = watched.wait_finished()
    (attempt,) = state.attempts
    assert len(attempt.launches) == 1
    skipped = attempt.skipped[0]
    assert (skipped.step, skipped.consecutive) == (16, 1)
    told = " ".join(f"{each.source}: {each.text}" for each in skipped.evidence)
    assert "rank 2" in told and "transient" in told, told
    assert [d.action for _, d in attempt.decisions] == [Action.ROLLBACK]
    (_, decision) = attempt.decisions[0]
    assert [(c.parameter, c.old, c.new) for c in decision.changes] == [
        ("lr_scale", "1", "0.5"),
        ("skipped_samples", "-", "800-847"),
    ]
    # 40 was not known to be good yet: 20 healthy steps had not followed it.
    assert [r.step for _, r in watched.events(Resumed)] == [0, 20]
    slurm.wait_for(
        lambda: "rollback" in (slurm.job(watched.job).field("Comment") or ""),
        30,
        "the job's comment",
    )
    done = consumed(watched.run.path)
    assert {step: done[step] for step in range(50)} == {step: samples[step] for step in range(50)}
    # Behind the window the stream goes on: every other sample is trained on, once.
    assert {step: done[step] for step in range(50, STEPS - 3)} == {
        step: samples[step + 3] for step in range(50, STEPS - 3)
    }


@pytest.mark.slow
def test_out_of_memory_in_backward_of_one_rank(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    _, samples = uninterrupted["ddp", 4]
    watched = submit(
        slurm,
        tmp_path,
        name="oom",
        partition="normal",
        args={"steps": STEPS, "micro_batch": 4, "faults": ["oom@30x970:rank2:above=2:always"]},
    )
    state = watched.wait_finished()
    assert causes(watched) == [Cause.CUDA_OOM]
    changes = state.attempts[0].decisions[0][1].changes
    assert [(c.parameter, c.old, c.new) for c in changes] == [("micro_batch", "4", "2")]
    assert state.attempts[0].incidents[0][1].rank == 2
    (attempt,) = state.attempts
    assert len(attempt.launches) == 2, "started again in the allocation, not in the queue"
    assert consumed(watched.run.path) == samples, "global batch or sample order changed"


@pytest.mark.slow
def test_a_frozen_rank_is_named_by_the_probe(slurm: SlurmCluster, tmp_path: Path) -> None:
    watched = submit(
        slurm,
        tmp_path,
        name="frozen",
        partition="normal",
        args={"steps": STEPS, "pace": 0.05, "faults": ["stop@40:rank3"]},
        probe={"every": "2s", "deadline": "3s"},
    )
    state = watched.wait(
        lambda s: any(i.cause is Cause.HANG for a in s.attempts for _, i in a.incidents),
        90,
        "the probe to fail",
    )
    incident = next(i for a in state.attempts for _, i in a.incidents)
    assert incident.rank == 3
    watched.wait(lambda s: len(s.attempts[0].launches) > 1, 30, "a relaunch")
    slurm.run("scancel", watched.job)


def test_controller_down_leaves_an_intent_that_reconcile_carries_out(
    slurm: SlurmCluster, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    reference, _ = uninterrupted["ddp", 2]
    watched = submit(
        slurm,
        tmp_path,
        nodes=2,
        name="nobody-there",
        args=PACE,
        partition="normal",
        recovery={"limits": {"controller_patience": "10s"}},
    )
    watched.wait_step(20)
    with slurm.stopped_controller():
        for rank in ranks_of(watched):
            os.kill(rank, signal.SIGTERM)
        watched.wait(lambda s: s.attempts[0].outcome == "open", 60, "the attempt to end")
    assert watched.state.open_intent is not None
    # It stays for Slurm to end it, since that may be what brings it back.
    slurm.wait_state(watched.job, ["RUNNING"], 60)
    with environment(slurm):
        brought = reconcile(watched.run, SubprocessSlurm.of_this_process())
        assert brought.changed
        assert not reconcile(watched.run, SubprocessSlurm.of_this_process()).changed
    state = watched.wait_finished()
    assert len(state.attempts) == 2
    assert repeated_steps(watched) == 0
    assert watched.digest() == reference


def ranks_of(watched: Watched) -> list[int]:
    """Process ids of what Slurm would signal: the agents that stand for the run's ranks."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            # srun is given the same words, and a signal for it cancels the step.
            by_python = not words[0].endswith(b"srun")
            agent = by_python and b"slurm_forge.process" in words and b"agent" in words
            if agent and str(watched.run.path).encode() in words:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = int(status[1])
    # What they have forked goes by the same words.
    agents = [pid for pid, parent in found.items() if parent not in found]
    assert agents, "no rank runs"
    return agents
