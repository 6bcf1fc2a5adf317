"""The timeline of a run: no moment twice, and the sums that ``explain`` gives in words."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_forge.journal import events as ev
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.story.story import RunStory
from slurm_forge.report.story.time_use import TimeSpan, TimeUse
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.report.journals import TUESDAY, Scribe
from tests.unit.report.test_any_journal import FACTS, TESTED


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path)


def told(story: RunStory) -> list[tuple[str, float, float, int]]:
    """Use, begin and end in seconds since the run was submitted, attempt."""
    return [
        (one.use.value, round(one.start - TUESDAY, 3), round(one.end - TUESDAY, 3), one.attempt)
        for one in story.spans
    ]


def test_a_crash_as_a_timeline(scribe: Scribe) -> None:
    scribe.submitted()
    scribe.later(60).begin()
    scribe.resume(0)
    scribe.train(1, 5)
    save = ev.CheckpointCommitted(
        name="step-00000005.a1.l1-00000000", step=5, reason="x", seconds=6, size=1, blocked_s=4
    )
    scribe.later(6).write("rank0", save)
    scribe.train(6, 8)
    scribe.later(25).incident(Cause.CRASH, Action.REQUEUE, step=8)
    scribe.requeued()
    scribe.later(121).begin()
    scribe.resume(5)
    scribe.train(6, 10)
    assert told(explain(scribe.facts())) == [
        ("queue", 0, 60, 1),
        ("startup", 60, 74, 1),
        ("training", 74, 124, 1),
        ("saving", 124, 128, 1),
        ("training", 128, 130, 1),
        ("repeated", 130, 160, 1),
        ("idle", 160, 186, 1),
        ("queue", 186, 307, 2),
        ("restart", 307, 321, 2),
        ("training", 321, 371, 2),
    ]


def test_what_a_stopped_run_has_not_saved_is_no_training_until_it_trains_again(
    scribe: Scribe,
) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 5)
    scribe.save(5)
    scribe.train(6, 8)
    assert [use for use, *_ in told(explain(scribe.facts()))][-1] == "training", "it may be saved"
    scribe.incident(Cause.HANG, Action.HOLD, step=8)
    scribe.held("hang")
    story = explain(scribe.facts())
    assert told(story)[1:3] == [("training", 14, 64, 1), ("unsaved", 64, 94.3, 1)]
    assert story.goodput == pytest.approx(80 / 95, abs=0.02), "it is still there to be seen"
    scribe.later(60).write("cli", ev.UserAsked(verb="requeue", user="mia"), launch=1 << 30)
    scribe.begin()
    scribe.resume(5)
    assert ("repeated", 64.3, 94.3, 1) in told(explain(scribe.facts()))


def test_a_held_run_is_stopped_until_somebody_asks_for_it(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 1)
    scribe.incident(Cause.HANG, Action.HOLD, step=1)
    scribe.held("hang")
    scribe.later(3600).write("cli", ev.UserAsked(verb="requeue", user="mia"), launch=1 << 30)
    scribe.later(30).begin()
    waits = told(explain(scribe.facts(after=7)))[3:]
    assert waits == [
        ("stopped", 25, 3625, 2),
        ("queue", 3625, 3655, 2),
        ("restart", 3655, 3662, 2),  # so far
    ]


def test_a_command_that_tells_no_steps_is_neither_training_nor_lost(scribe: Scribe) -> None:
    scribe.submitted()
    scribe.later(5).begin(via="sbatch")
    scribe.relaunch(world_size=0, nodes=())
    scribe.later(600).write("supervisor", ev.LaunchEnded(outcome="finished"))
    scribe.run.mark_done(0, 1)
    scribe.write("supervisor", ev.Finished(step=0))
    scribe.end("finished")
    uses = [(use, end - start) for use, start, end, _ in told(explain(scribe.facts()))]
    assert uses == [("queue", 5), ("program", 600), ("shutdown", 1)]


def _train(scribe: Scribe, step: int) -> int:
    scribe.train(step + 1, step + 3, seconds=7)
    return step + 3


def _save(scribe: Scribe, step: int) -> int:
    saved = ev.CheckpointCommitted(
        name=f"step-{step:08d}.a1.l1-00000000",
        step=step,
        reason="x",
        seconds=3,
        size=1,
        blocked_s=2.5,
    )
    scribe.later(3).write("rank0", saved)
    return step


def _roll_back(scribe: Scribe, step: int) -> int:
    scribe.unstable(step, Action.ROLLBACK, target=step // 2)
    scribe.again(step // 2)
    return step // 2


def _crash(scribe: Scribe, step: int) -> int:
    scribe.later(9).incident(Cause.CRASH, Action.RELAUNCH, step=step)
    scribe.later(4).relaunch()
    scribe.resume(step // 3)
    return step // 3


def _preempt(scribe: Scribe, step: int) -> int:
    scribe.preempted(step)
    scribe.later(50).begin()
    scribe.resume(step)
    return step


def _hold(scribe: Scribe, step: int) -> int:
    scribe.incident(Cause.HANG, Action.HOLD, step=step)
    scribe.held("hang")
    scribe.later(100).write("cli", ev.UserAsked(verb="requeue", user="x"), launch=1 << 30)
    scribe.later(20).begin()
    scribe.resume(0)
    return 0


Move = Callable[[Scribe, int], int]
MOVES: tuple[Move, ...] = (_train, _save, _roll_back, _crash, _preempt, _hold)
ENDS = ("training", "finished", "requeued", "held")


def played(scribe: Scribe, moves: list[Move], end: str) -> RunFacts:
    scribe.submitted()
    scribe.later(60).begin()
    scribe.resume(0)
    step = _train(scribe, 0)
    for move in moves:
        step = move(scribe, step)
    step = _train(scribe, step)
    if end == "finished":
        scribe.later(5).finish(step)
    elif end == "requeued":
        scribe.preempted(step)
    elif end == "held":
        scribe.incident(Cause.HANG, Action.HOLD, step=step)
        scribe.held("hang")
    return scribe.facts(after=33)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(MOVES), max_size=6), st.sampled_from(ENDS))
def test_spans_add_up_to_what_is_told_in_words(moves: list[Move], end: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        story = explain(played(Scribe(Path(folder)), moves, end))
    seconds: Counter[TimeUse] = Counter()
    rank_seconds: Counter[TimeUse] = Counter()
    for span in story.spans:
        seconds[span.use] += span.seconds
        rank_seconds[span.use] += span.rank_seconds
    assert {use: seconds[use] for use in TimeUse} == {
        TimeUse.QUEUE: pytest.approx(story.waited_s),
        TimeUse.STOPPED: pytest.approx(story.rest_s),
        TimeUse.STARTUP: pytest.approx(story.startup_s),
        TimeUse.RESTART: pytest.approx(seconds[TimeUse.RESTART]),
        TimeUse.TRAINING: pytest.approx(
            story.kept_s - seconds[TimeUse.SAVING] - seconds[TimeUse.UNSAVED]
        ),
        TimeUse.UNSAVED: pytest.approx(seconds[TimeUse.UNSAVED]),
        TimeUse.SAVING: pytest.approx(seconds[TimeUse.SAVING]),
        TimeUse.REPEATED: pytest.approx(story.repeated_s),
        TimeUse.PROGRAM: 0,
        TimeUse.IDLE: pytest.approx(story.idle_rank_s / 8),
        TimeUse.SHUTDOWN: pytest.approx(story.ending_s),
    }
    lost = rank_seconds[TimeUse.REPEATED] + rank_seconds[TimeUse.RESTART]
    assert lost == pytest.approx(story.lost_rank_s)
    assert story.elapsed_s is not None
    first_wait = story.waited_s - story.queued_s
    assert sum(seconds.values()) == pytest.approx(story.elapsed_s + first_wait)
    _apart(story.spans)


@TESTED
@given(FACTS)
def test_no_moment_of_an_attempt_counts_twice_whatever_the_journal_holds(facts: RunFacts) -> None:
    _apart(explain(facts).spans)


def _apart(spans: tuple[TimeSpan, ...]) -> None:
    assert all(span.seconds > 0 for span in spans)
    for before, after in pairwise(spans):
        assert before.attempt < after.attempt or before.end <= after.start
