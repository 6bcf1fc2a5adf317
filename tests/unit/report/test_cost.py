"""What an interruption cost, as a reader is told: steps, GPU time, and time in the queue."""

from __future__ import annotations

from dataclasses import replace
from datetime import timezone
from pathlib import Path

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.story.story import IncidentStory
from slurm_forge.report.text import rank_time
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.report.journals import Scribe


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path)


def told(facts: RunFacts) -> str:
    return explain_text(explain(facts), now=facts.now, reference="tiny-gpt", zone=timezone.utc)


def incidents(facts: RunFacts) -> list[IncidentStory]:
    story = explain(facts)
    return [i for a in story.attempts for launch in a.launches for i in launch.incidents]


def crashed(scribe: Scribe) -> None:
    """30 of 80 steps lost; 25 s until it is noticed, 121 s of Slurm's own delay, 14 s to start."""
    scribe.submitted()
    scribe.later(60).begin()
    scribe.resume(0)
    scribe.train(1, 50)
    scribe.save(50)
    scribe.train(51, 80)
    scribe.later(25).incident(Cause.CRASH, Action.REQUEUE, step=80, text="SIGSEGV")
    scribe.requeued()
    scribe.later(121).begin()
    scribe.resume(50)
    scribe.train(51, 100)


def test_the_gpu_time_of_a_crash_is_what_is_repeated_and_the_start_after_it(
    scribe: Scribe,
) -> None:
    crashed(scribe)
    (crash,) = incidents(scribe.facts())
    assert crash.ranks == 8
    assert (crash.repeated_s, crash.startup_s) == (pytest.approx(300), pytest.approx(14))
    assert crash.lost_rank_s == pytest.approx(8 * 314)
    # 25 s until somebody noticed, and 1 s until the job had ended.
    assert crash.idle_rank_s == pytest.approx(8 * 26)
    story = explain(scribe.facts())
    assert story.lost_rank_s == pytest.approx(8 * 314)
    assert story.idle_rank_s == pytest.approx(8 * 26)
    assert story.waited_s == pytest.approx(60 + 121)
    assert story.starts == 1


def test_a_crash_in_words_with_gpus_and_without(scribe: Scribe) -> None:
    crashed(scribe)
    text = told(scribe.facts())
    assert "30 steps repeated, 5 min" in text
    assert "42 rank-minutes lost, 3.5 rank-minutes idle\n" in text
    cost = "42 rank-minutes lost (30 steps repeated, 1 restart), 3.5 rank-minutes idle, "
    waits = "2 min 1 s waiting in the queue, 60 s waiting in the queue before the first start"
    assert f"\nWhat it cost: {cost}{waits}.\n" in text
    assert "   start-up 14 s, waiting 2 min 1 s, lost 5 min 40 s of 25 min\n" in text
    gpus = told(replace(scribe.facts(), gpus_per_rank=4.0))
    assert "2.8 GPU-hours lost, 14 GPU-minutes idle\n" in gpus
    assert "rank-" not in gpus


def test_what_is_lost_adds_up_to_what_the_header_says(scribe: Scribe) -> None:
    crashed(scribe)
    story = explain(scribe.facts())
    assert story.elapsed_s is not None
    rest = story.elapsed_s - story.kept_s - story.startup_s - story.queued_s - story.ending_s
    assert (story.lost_rank_s + story.idle_rank_s) / 8 == pytest.approx(rest, abs=1e-6)


def test_steps_that_only_the_end_of_a_launch_tells_of_took_their_time(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 1, seconds=0.01)  # young ones say little of the pace
    scribe.later(300).incident(Cause.APP_ERROR, Action.RELAUNCH, step=20)
    scribe.relaunch()
    scribe.resume(0)
    scribe.train(1, 100)
    scribe.later(30).incident(Cause.APP_ERROR, Action.RELAUNCH, step=120)
    scribe.relaunch()
    scribe.resume(100)
    first, second = incidents(scribe.facts())
    assert (first.repeated_steps, second.repeated_steps) == (20, 20)
    assert first.lost_s == pytest.approx(190, rel=0.02)
    assert second.lost_s == pytest.approx(30)  # never more than there was
    assert (first.idle_s, second.idle_s) == (pytest.approx(110, rel=0.03), 0)
    story = explain(scribe.facts())
    assert story.elapsed_s is not None
    rest = story.elapsed_s - story.kept_s - story.startup_s
    assert (story.lost_rank_s + story.idle_rank_s) / 8 == pytest.approx(rest, abs=1e-6)


def test_a_start_that_failed_is_lost_to_what_it_failed_of(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 10)
    scribe.save(10)
    scribe.incident(Cause.HANG, Action.RELAUNCH, step=10)
    scribe.relaunch()
    scribe.later(40).incident(Cause.NCCL_ERROR, Action.RELAUNCH)
    scribe.relaunch()
    scribe.resume(10)
    hang, nccl = incidents(scribe.facts())
    assert hang.lost_rank_s == 0
    assert nccl.startup_s == pytest.approx(40 + 14)
    assert explain(scribe.facts()).starts == 2


def test_ranks_that_wait_between_two_launches_hold_their_nodes_in_vain(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 10)
    scribe.save(10)
    scribe.incident(Cause.EXTERNAL_SERVICE, Action.RELAUNCH, step=10, wait=30.0)
    scribe.later(30).relaunch()
    scribe.resume(10)
    (incident,) = incidents(scribe.facts())
    assert (incident.idle_s, incident.startup_s) == (pytest.approx(30), pytest.approx(14))
    assert "1.9 rank-minutes lost, 4.0 rank-minutes idle" in told(scribe.facts())


def test_the_very_first_start_and_the_ending_cost_nothing_extra(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 40)
    scribe.later(30).finish(40)
    story = explain(scribe.facts())
    assert (story.lost_rank_s, story.idle_rank_s, story.waited_s) == (0, 0, 0)
    assert "What it cost" not in told(scribe.facts())


def test_a_first_start_that_never_trained_is_lost(scribe: Scribe) -> None:
    scribe.begin()
    scribe.later(50).incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    scribe.end("hold")
    assert explain(scribe.facts()).lost_rank_s == pytest.approx(8 * 50)
    assert "6.7 rank-minutes lost" in told(scribe.facts())


def test_a_rollback_in_the_process_is_no_start(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.save(20)
    scribe.train(21, 30)
    scribe.unstable(30, Action.ROLLBACK, target=20)
    scribe.again(20, load=3.0)
    scribe.train(21, 40)
    (bad,) = incidents(scribe.facts())
    assert bad.lost_rank_s == pytest.approx(8 * 103)
    assert bad.idle_rank_s == 0
    assert "lost (10 steps repeated).\n" in told(scribe.facts())


def test_steps_that_are_skipped_in_passing_take_nothing_from_a_later_start(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 10)
    scribe.unstable(10, Action.WARN, cause=Cause.LOSS_SPIKE)
    scribe.later(20).train(11, 20)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, step=20)
    scribe.relaunch()
    scribe.resume(20)
    spike, crash = incidents(scribe.facts())
    assert (spike.lost_rank_s, spike.idle_rank_s) == (0, 0)
    assert crash.lost_rank_s > 0


def test_time_that_nobody_asked_for_is_no_waiting_and_no_loss(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 10)
    scribe.save(10)
    scribe.incident(Cause.APP_ERROR, Action.HOLD, rung=None, step=10)
    scribe.end("hold")
    scribe.later(7200).submitted("8812400")
    scribe.later(40).begin(job="8812400")
    scribe.resume(10)
    scribe.train(11, 20)
    story = explain(scribe.facts())
    assert (story.rest_s, story.queued_s) == (pytest.approx(7200), pytest.approx(40))
    assert "waiting 40 s, stopped 2 h, lost 15 s of " in told(scribe.facts())


def test_a_held_run_waits_from_its_release_on_where_that_is_known(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    scribe.held("app_error: for a person to judge")
    scribe.later(7200).write("cli", ev.UserAsked(verb="release", user="x"), launch=1 << 30)
    scribe.later(40).begin()
    story = explain(scribe.facts())
    assert story.attempts[1].waited_s == 40
    assert (story.rest_s, story.queued_s) == (pytest.approx(7200), pytest.approx(40))


def test_a_requeue_that_came_through_late_is_no_time_in_the_queue(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 100)
    scribe.preempted(100)
    done = ev.RequeueDone(job="8812345", method="scontrol requeue")
    scribe.later(360).write("cli", done, launch=1 << 30)
    scribe.later(6).begin()
    story = explain(scribe.facts())
    assert (story.rest_s, story.queued_s) == (pytest.approx(360), pytest.approx(6))


def test_a_held_run_that_slurm_was_told_to_release_has_not_waited_all_the_time(
    scribe: Scribe,
) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    scribe.held("app_error: for a person to judge")
    scribe.later(7200).begin()
    story = explain(scribe.facts())
    assert story.attempts[1].waited_s is None
    assert (story.rest_s, story.queued_s) == (pytest.approx(7200), 0)
    assert "stopped 2 h" in told(scribe.facts())


def test_a_run_that_waits_now_has_waited_until_now(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 100)
    scribe.preempted(100)
    text = told(scribe.facts(after=600))
    assert "waiting 10 min" in text.splitlines()[0]
    assert "10 min waiting in the queue.\n" in text


def test_a_run_that_has_not_been_started_yet_waits_all_the_same(scribe: Scribe) -> None:
    scribe.submitted()
    facts = scribe.facts(after=300)
    assert explain(facts).waited_s == 300
    assert "\nWhat it cost: 5 min waiting in the queue before the first start.\n" in told(facts)


def test_a_back_off_is_told_before_it_is_over_and_after(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(Cause.EXTERNAL_SERVICE, Action.REQUEUE, wait=240.0)
    scribe.requeued()
    assert "requeued · next start in 4 min" in told(scribe.facts())
    scribe.later(240).begin()
    scribe.resume(0)
    assert "requeued · next start delayed by 4 min" in told(scribe.facts())
    assert explain(scribe.facts()).attempts[0].launches[0].incidents[0].decision is not None


def test_an_update_that_slurm_refused_is_not_a_requeue_left_open(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(Cause.HOST_OOM, Action.RAISE_MEM)
    method = "scontrol requeue"
    scribe.write("supervisor", ev.RequeueIntended(job="8812301", method=method, reason="x"))
    scribe.write("supervisor", ev.RequeueDone(job="8812301", method=method))
    scribe.write(
        "supervisor",
        ev.RequeueFailed(job="8812301", method="scontrol update", reason="Memory required"),
    )
    scribe.end("requeued")
    text = told(scribe.facts())
    assert "requeued" in text
    assert "left open" not in text
    assert "scontrol update failed: Memory required" in text


@pytest.mark.parametrize(
    ("rank_seconds", "gpus", "words"),
    [
        (0.0, None, "0.0 rank-seconds"),
        (40.0, 1.0, "40 GPU-seconds"),
        (100.0, None, "1.7 rank-minutes"),
        (99 * 60.0, None, "99 rank-minutes"),
        (3600.0, 8.0, "8.0 GPU-hours"),
        (3600.0 * 12_345, 1.0, "12345 GPU-hours"),
        (float("nan"), None, "?"),
    ],
)
def test_rank_time_in_words(rank_seconds: float, gpus: float | None, words: str) -> None:
    assert rank_time(rank_seconds, gpus) == words


def test_steps_not_saved_are_at_least_those_known_of_where_nobody_said_how_far_it_was(
    scribe: Scribe,
) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 1)
    scribe.incident(Cause.UNKNOWN, Action.HOLD, step=1, text="ended without a message", exact=False)
    scribe.end("held")
    assert "at least 1 step not saved" in told(scribe.facts())
