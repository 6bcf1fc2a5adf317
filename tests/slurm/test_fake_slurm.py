"""The fake Slurm tells the same stories as a real one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.slurm.client import JobUpdate
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.nodelist import expand_nodes
from slurm_forge.testing.cluster import SlurmCluster
from tests.slurm.fake_worlds import (
    FakeWorld,
    Kind,
    RealWorld,
    Story,
    lasting,
    missing,
    shown,
)

pytestmark = pytest.mark.slurm

Scenario = Callable[[Story], None]


def everyday(story: Story) -> None:
    """Requeues in each state, refusals, a hold and its release, a cancel, a dependency."""
    story.submit("a", Kind.SLEEPS)
    story.submit("done", Kind.SUCCEEDS)
    story.submit("waits", Kind.SLEEPS, "--hold")
    story.submit("after", Kind.SLEEPS, "--dependency=afterany:{a}")
    story.submit("never", Kind.SLEEPS, "--no-requeue")
    for name in ("a", "never"):
        story.wait(name, JobState.RUNNING)
    story.wait("done", JobState.COMPLETED)
    story.wait("after", lambda r: r.reason == "Dependency")
    for name in ("a", "a", "done", "waits", "after", "never", "67000000"):
        story.requeue(name)
    story.requeue("never", hold=True)
    story.wait("a", lambda r: r.state is JobState.RUNNING and r.restarts == 1)
    story.wait("done", lambda r: r.state is JobState.COMPLETED and r.restarts == 1)
    story.requeue("a", hold=True)
    story.wait("a", lambda r: r.held)
    story.requeue("a")
    story.ask("a", lambda slurm, job: slurm.cancel(job))
    story.wait("a", JobState.CANCELLED)
    story.wait("after", JobState.RUNNING)


def exit_in_the_grace_time(story: Story) -> None:
    """Up to 23.11 the work is lost: it has completed, says Slurm."""
    story.submit("a", Kind.LEAVES, "-ppreempt")
    story.ready("a")
    story.world.preempt(story.job("a"))
    story.wait("a", lambda r: r.preempt_time is not None)
    story.wait("a", JobState.COMPLETED)
    story.watch_for(3)


def requeue_and_hold(story: Story) -> None:
    story.submit("late", Kind.SLEEPS)
    story.submit("soon", Kind.SLEEPS)
    story.submit("done", Kind.SUCCEEDS)
    story.submit("running", Kind.SLEEPS)
    story.wait("done", JobState.COMPLETED)
    for name in ("late", "soon", "running"):
        story.wait(name, JobState.RUNNING)
    story.ask("running", lambda slurm, job: slurm.hold(job))
    story.requeue("running")
    for name in ("late", "soon", "done"):
        story.requeue(name, hold=True)
        story.wait(name, lambda r: r.held)
    story.ask("soon", lambda slurm, job: slurm.release(job))
    story.wait("soon", JobState.RUNNING)
    story.wait("running", lambda r: r.held)
    story.watch_for(7)
    for name in ("late", "done", "running"):
        story.ask(name, lambda slurm, job: slurm.release(job))
    story.wait("late", JobState.RUNNING)
    story.wait("running", JobState.RUNNING)
    story.wait("done", JobState.COMPLETED)


def cancelled(story: Story) -> None:
    """A cancel ends it; a requeue afterwards, even while it ends, starts it again."""
    story.submit("waiting", Kind.SLEEPS, "--begin=now+600")
    story.submit("running", Kind.STUBBORN)
    story.submit("ending", Kind.STUBBORN)
    story.submit("requeued", Kind.STUBBORN)
    for name in ("running", "ending", "requeued"):
        story.wait(name, JobState.RUNNING)
    story.watch_for(1)
    for name in ("waiting", "running", "ending"):
        story.ask(name, lambda slurm, job: slurm.cancel(job))
    story.requeue("requeued")
    story.ask("requeued", lambda slurm, job: slurm.cancel(job))
    story.requeue("ending")
    for name in ("waiting", "running", "requeued"):
        story.wait(name, JobState.CANCELLED)
    story.wait("ending", lambda r: r.state is JobState.RUNNING and r.restarts == 1)
    story.requeue("running")
    story.wait("running", lambda r: r.state is JobState.RUNNING and r.restarts == 1)


def preempted_to_the_end(story: Story) -> None:
    story.submit("a", Kind.STUBBORN, "-ppreempt")
    story.submit("asks", Kind.STUBBORN, "-ppreempt")
    story.submit("never", Kind.STUBBORN, "-ppreempt", "--no-requeue")
    for name in ("a", "asks", "never"):
        story.wait(name, JobState.RUNNING)
    story.watch_for(1)
    for name in ("a", "asks", "never"):
        story.world.preempt(story.job(name))
    story.wait("asks", lambda r: r.preempt_time is not None)
    story.requeue("asks")
    for name in ("a", "asks"):
        story.wait(name, lambda r: r.state is JobState.RUNNING and r.restarts == 1)
    story.wait("never", JobState.PREEMPTED)
    story.requeue("never")


def cancelled_in_the_grace_time(story: Story) -> None:
    """All that tells it from the preemption: EndTime is earlier than it was to be."""
    for name, partition in (("a", "preempt"), ("b", "cancel")):
        story.submit(name, Kind.STUBBORN, f"-p{partition}")
        story.wait(name, JobState.RUNNING)
    story.watch_for(1)
    for name in ("a", "b"):
        story.world.preempt(story.job(name))
        planned = story.wait(name, lambda r: r.preempt_time is not None).end_time
        story.ask(name, lambda slurm, job: slurm.cancel(job))
        ending = story.wait(name, JobState.COMPLETING)
        assert planned is not None and ending.end_time is not None
        assert ending.end_time < planned - timedelta(seconds=5)
        story.wait(name, JobState.CANCELLED)


def preempted_without_notice(story: Story) -> None:
    story.submit("a", Kind.STUBBORN, "-ppreempt-nograce")
    story.submit("soft", Kind.SLEEPS, "-ppreempt-nograce")
    for name in ("a", "soft"):
        story.wait(name, JobState.RUNNING)
    story.watch_for(1)
    for name in ("a", "soft"):
        story.world.preempt(story.job(name))
    for name in ("a", "soft"):
        story.wait(name, lambda r: r.state is JobState.RUNNING and r.restarts == 1)


def preempted_and_cancelled(story: Story) -> None:
    story.submit("a", Kind.STUBBORN, "-pcancel")
    story.submit("leaves", Kind.LEAVES, "-pcancel")
    for name in ("a", "leaves"):
        story.wait(name, JobState.RUNNING)
    story.ready("leaves")
    for name in ("a", "leaves"):
        story.world.preempt(story.job(name))
    story.wait("leaves", JobState.COMPLETED)
    story.wait("a", JobState.PREEMPTED)
    story.requeue("a")
    story.wait("a", lambda r: r.state is JobState.RUNNING and r.restarts == 1)


def time_limit(story: Story) -> None:
    story.submit("a", Kind.SLEEPS, "--time=1")
    story.submit("stubborn", Kind.STUBBORN, "--time=1")
    story.wait("a", JobState.TIMEOUT, 150)
    story.wait("stubborn", JobState.TIMEOUT)
    story.requeue("a")
    story.wait("a", lambda r: r.state is JobState.RUNNING and r.restarts == 1)


def changed(story: Story) -> None:
    """What may be changed while it waits, while it is requeued, while it runs, and afterwards."""
    node = story.world.client.show_partitions()[0].nodes
    assert node is not None
    first = expand_nodes(node)[0]
    updates = (
        JobUpdate(exclude_nodes=(first,)),
        JobUpdate(exclude_nodes=("no-such-node",)),
        JobUpdate(memory_per_node=300 << 20),
        JobUpdate(time_limit=timedelta(minutes=5)),
        JobUpdate(comment="more memory"),
        JobUpdate(num_nodes=2),
    )
    story.submit("waits", Kind.SLEEPS, "--begin=now+600")
    story.submit("runs", Kind.STUBBORN)
    story.submit("over", Kind.FAILS)
    story.wait("runs", JobState.RUNNING)
    story.wait("over", JobState.FAILED)
    for name in ("waits", "over", "67000000"):
        for update in updates:
            story.ask(name, lambda slurm, job, update=update: slurm.update_job(job, update))
    for update in (updates[0], updates[2], updates[4], updates[5]):
        story.ask("runs", lambda slurm, job, update=update: slurm.update_job(job, update))
    for name in ("over", "67000000"):
        story.ask(name, lambda slurm, job: slurm.hold(job))
        story.ask(name, lambda slurm, job: slurm.release(job))
    later = JobUpdate(start_after=timedelta(seconds=14))
    story.ask("runs", lambda slurm, job: slurm.update_job(job, later))
    story.requeue("runs")
    story.ask("runs", lambda slurm, job: slurm.update_job(job, later))
    story.ask("runs", lambda slurm, job: slurm.update_job(job, updates[0]))
    story.ask("waits", lambda slurm, job: slurm.update_job(job, JobUpdate(num_nodes=1)))
    now = JobUpdate(start_after=timedelta(0))
    story.ask("waits", lambda slurm, job: slurm.update_job(job, now))
    waiting = story.wait("waits", JobState.RUNNING)
    again = story.wait("runs", lambda r: r.state is JobState.RUNNING and r.restarts == 1)
    for record in (waiting, again):
        assert record.excluded_nodes == first and first not in expand_nodes(record.nodelist or "")


def node_lost(story: Story) -> None:
    story.submit("a", Kind.STUBBORN, "--requeue")
    record = story.wait("a", JobState.RUNNING)
    story.submit("never", Kind.STUBBORN, "--no-requeue")
    other = story.wait("never", JobState.RUNNING)
    for each in {record.nodelist or "", other.nodelist or ""}:
        story.world.lose_node(each)
    story.wait("a", lambda r: r.state is JobState.RUNNING and r.restarts == 1, 120)
    story.wait("never", JobState.NODE_FAIL)
    story.requeue("never")


def node_lost_and_outlived(story: Story) -> None:
    """With --no-kill the job runs on; a requeue gives it as many nodes as it asked for."""
    story.submit("a", Kind.STUBBORN, "--requeue", "--no-kill", "--nodes=2")
    first = story.wait("a", JobState.RUNNING)
    batch_host, lost = expand_nodes(first.nodelist or "")
    story.world.lose_node(lost)
    fewer = story.wait("a", lambda r: r.nodelist == batch_host, 120)
    assert (fewer.state, fewer.num_nodes, fewer.failed_node) == (JobState.RUNNING, 1, None)
    story.requeue("a")
    again = story.wait("a", lambda r: r.state is JobState.RUNNING and r.restarts == 1)
    nodes = expand_nodes(again.nodelist or "")
    assert (len(nodes), again.num_nodes, lost in nodes) == (2, 2, False)


def one_task_of_an_array(story: Story) -> None:
    array = story.world.submit(Kind.SLEEPS, "--array=1-2")
    for task in (1, 2):
        story.watch(f"task{task}", f"{array}_{task}")
    for task in (1, 2):
        story.wait(f"task{task}", JobState.RUNNING)
    story.requeue("task2")
    story.wait("task2", lambda r: r.state is JobState.RUNNING and r.restarts == 1)
    story.ask("task1", lambda slurm, job: slurm.cancel(job))
    story.wait("task1", JobState.CANCELLED)
    story.watch("all", array)
    story.seen.pop("all")
    story.requeue("all")
    for task in (1, 2):
        story.wait(f"task{task}", lambda r: r.state is JobState.RUNNING and r.restarts > 0)


QUICK: tuple[Scenario, ...] = (everyday, exit_in_the_grace_time)
SLOW: tuple[Scenario, ...] = (
    requeue_and_hold,
    cancelled,
    preempted_to_the_end,
    cancelled_in_the_grace_time,
    preempted_without_notice,
    preempted_and_cancelled,
    time_limit,
    changed,
    node_lost,
    node_lost_and_outlived,
    one_task_of_an_array,
)


@pytest.mark.parametrize(
    "scenario",
    [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)],
    ids=lambda scenario: scenario.__name__,
)
def test_the_fake_tells_the_same_story(
    slurm: SlurmCluster, tmp_path: Path, scenario: Scenario
) -> None:
    real, fake = Story(RealWorld(slurm, tmp_path)), Story(FakeWorld(slurm))
    scenario(fake)
    scenario(real)
    assert fake.answers == real.answers
    assert fake.seen.keys() == real.seen.keys()
    for name, seen in real.seen.items():
        told = f"{name}, real:\n  {shown(seen)}\n{name}, fake:\n  {shown(fake.seen[name])}"
        assert lasting(fake.seen[name]) == lasting(seen), told
        assert missing(seen, fake.seen[name]) is None, told
