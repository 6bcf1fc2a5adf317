"""What a person reads about a run that was interrupted, rolled back, held, or is still going."""

from __future__ import annotations

from dataclasses import replace
from datetime import timezone
from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.journal import events as ev
from slurm_forge.launch.attempt.failed_start import report_failed_start
from slurm_forge.report.explain.explain import (
    explain,
    only_attempt,
)
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.status import take_status
from slurm_forge.report.status.status_text import status_text
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Action, Change
from slurm_forge.vocabulary.job_change import JobChange
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.fake_slurm import FakeSlurm
from tests.unit.report.journals import Scribe


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path)


def told(facts: RunFacts, attempt: int | None = None, *, verbose: bool = False) -> str:
    return explain_text(
        explain(facts),
        now=facts.now,
        reference="tiny-gpt",
        zone=timezone.utc,
        attempt=attempt,
        verbose=verbose,
    )


def preempted_and_finished(scribe: Scribe) -> None:
    """100 steps, preempted, 17 min in the queue, 300 steps."""
    scribe.submitted()
    scribe.later(180).begin("n01", "n02", "n03", "n04")
    scribe.resume(0)
    scribe.train(1, 100)
    scribe.preempted(100)
    scribe.later(17 * 60).begin("n02", "n05")
    scribe.resume(100)
    scribe.train(101, 400)
    scribe.save(400, reason="final")
    scribe.finish(400)


def test_the_story_of_a_preempted_run_that_finished(scribe: Scribe) -> None:
    preempted_and_finished(scribe)
    assert told(scribe.facts(after=9999)) == (
        "tiny-gpt   finished   step 400 of 400   2 attempts, 2 launches   "
        "goodput 79.2 %   start-up 14 s, waiting 17 min, lost 15 s of 84 min\n"
        "\n"
        "attempt 1   job 8812301   n[01-04]   Tue 11 Aug 09:03 → 09:20   "
        "waited 3 min in the queue\n"
        "  launch 1   8 ranks   from the start, training after 14 s "
        "(interpreter 8.0 s, rendezvous 2.1 s, load 3.1 s)\n"
        "  preempted        09:20:00   scontrol: PreemptTime=11:02:10 EndTime=11:04:10   "
        "(certain)\n"
        "    saved step 100 in 4.1 s, committed 6.1 s after the notice · requeued · 0 steps lost · "
        "1.9 rank-minutes lost\n"
        "\n"
        "attempt 2   job 8812301   n[02,05]   Tue 11 Aug 09:37 → 10:27   "
        "waited 17 min in the queue\n"
        "  launch 1   8 ranks   from step 100 (step-00000100.a1.l1-00000000), "
        "training after 14 s (interpreter 8.0 s, rendezvous 2.1 s, load 3.1 s)\n"
        "  finished at step 400   10:27:15   1 checkpoint, the last at step 400, 0.3 s each\n"
        "\n"
        "What it cost: 1.9 rank-minutes lost (1 restart), 17 min waiting in the queue, "
        "3 min waiting in the queue before the first start.\n"
        "Changes that affect your results: none.\n"
        "Next time: no action needed.\n"
        "Details: slurm-forge explain tiny-gpt --attempt 1\n"
    )


def test_what_a_resume_differed_in_is_told_and_what_it_was_refused_for(scribe: Scribe) -> None:
    scribe.submitted()
    scribe.begin("n01")
    name = "step-00000100.a1.l1-00000000"
    for refused, line in ((False, "torch: was 2.9, is 2.10"), (True, "sampling.seed: was 0, is 1")):
        scribe.write(
            "rank0", ev.ResumeCompared(checkpoint=name, differences=(line,), refused=refused)
        )
    text = told(scribe.facts())
    assert "note: resumed with a difference: torch: was 2.9, is 2.10" in text
    assert "note: not resumed, because: sampling.seed: was 0, is 1" in text
    assert "Changes that affect your results: none." in text
    line = "data train: part-3 changed: 1 kB -> 2 kB"
    scribe.write("rank0", ev.ResumeCompared(checkpoint=name, differences=(line,), refused=False))
    text = told(scribe.facts())
    assert (
        f"Changes that affect your results: resumed with differences in attempt 1: {line}" in text
    )


def test_an_edit_of_live_code_changes_the_result_and_new_code_is_told_once(scribe: Scribe) -> None:
    scribe.submitted()
    scribe.begin("n01")
    scribe.train(1, 10)
    scribe.save(10)
    name = "step-00000010.a1.l1-00000000"
    line = "code.program: was aa, is bb"

    def resume() -> str:
        scribe.write(
            "rank0", ev.ResumeCompared(checkpoint=name, differences=(line,), refused=False)
        )
        return told(scribe.facts())

    change = JobChange(key="code", old="aa", new="bb")
    asked = ev.JobChanged(verb="requeue --code new", user="ada", revision=1, changes=(change,))
    scribe.later(1).write("cli", asked, launch=1 << 30)
    scribe.later(1).begin("n01")
    assert "resumed with differences" not in resume()
    scribe.save(20)
    scribe.later(1).begin("n01")
    name = "step-00000020.a2.l1-00000000"
    assert f"resumed with differences in attempt 3: {line}" in resume()


def test_a_long_exception_keeps_its_beginning_and_its_end_and_verbose_shows_all(
    scribe: Scribe,
) -> None:
    scribe.submitted()
    scribe.begin("n01")
    scribe.resume(0)
    mismatches = " ".join(f"size mismatch for layers.{n}.weight." for n in range(300))
    text = f"RuntimeError: Error(s) in loading state_dict: {mismatches} (train.py:31 in main)"
    scribe.incident(Cause.APP_ERROR, Action.HOLD, text=text)
    for attempt, most in ((None, 1500), (1, 3000)):
        lines = told(scribe.facts(), attempt)
        assert "RuntimeError: Error(s) in loading state_dict" in lines
        assert "(train.py:31 in main)" in lines and "layers.150." not in lines
        assert len(lines) < most
    assert "--verbose" in told(scribe.facts(), 1)
    assert text in told(scribe.facts(), 1, verbose=True)


def test_the_next_step_of_an_error_is_not_cut_and_is_what_explain_says_to_do(
    scribe: Scribe,
) -> None:
    scribe.submitted()
    scribe.begin("n01")
    scribe.resume(0)
    text = f"ConfigError: {'x' * 400}; next: Pass until=forge.Steps({'9' * 450})."
    scribe.incident(Cause.APP_ERROR, Action.HOLD, text=text, step=0, rung=None)
    lines = told(scribe.facts())
    step = text.partition("; next: ")[2]
    assert " … " in lines and f"x; next: {step}" in lines
    assert f"Next: {step.rstrip('.')}, then " in lines


def test_the_figures_of_a_preempted_run(scribe: Scribe) -> None:
    preempted_and_finished(scribe)
    story = explain(scribe.facts(after=9999))
    first, second = story.attempts
    assert (first.waited_s, second.waited_s) == (180, 17 * 60)
    launch = first.launches[0]
    assert launch.repeated_steps == 0
    assert launch.agreed_s == 0.003
    assert launch.notice_to_saved_s == pytest.approx(6.1, abs=0.01)
    assert launch.resumes[0].start_s == 14
    assert second.launches[0].repeated_steps is None
    # 4000 s of steps and 6.4 s of saves; the hours after the end count for nothing.
    assert story.kept_s == story.training_s == pytest.approx(4006.4, abs=0.1)
    assert story.elapsed_s == pytest.approx(1000 + 7.1 + 14 + 17 * 60 + 14 + 3000 + 1.3, abs=0.1)
    assert story.elapsed_s is not None
    assert story.goodput == pytest.approx(4006.4 / story.elapsed_s, abs=1e-4)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (("n01", "n04"), "relaunched on n01 + spare n04 · "),
        (("n01",), "relaunched on n01 · "),
        (("n02", "n01"), "relaunched in the allocation · "),
    ],
)
def test_where_the_ranks_went_is_told(scribe: Scribe, nodes: tuple[str, ...], words: str) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 30)
    scribe.incident(Cause.NODE_FAIL, Action.RELAUNCH, text="no word", step=30)
    scribe.relaunch(nodes=nodes)
    scribe.resume(0)
    assert words in told(scribe.facts())


@pytest.mark.parametrize(
    ("start", "words"),
    [("cold", ""), ("warm", ", warm"), ("in_process", ", in the same processes")],
)
def test_from_what_ranks_were_started_again(scribe: Scribe, start: str, words: str) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 50)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, text="exit status 139", step=50)
    scribe.relaunch(start=start)
    scribe.resume(0)
    scribe.train(1, 10)
    assert f"relaunched in the allocation{words} ·" in told(scribe.facts())


def test_what_is_repeated_is_from_the_last_step_to_the_one_resumed_from(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 50)
    scribe.save(50)
    scribe.train(51, 80)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, text="exit status 139", step=81)
    scribe.relaunch()
    scribe.resume(50)
    scribe.train(51, 60)
    story = explain(scribe.facts())
    assert story.attempts[0].launches[0].repeated_steps == 31
    assert story.repeated_steps == 31
    assert story.repeated_s == pytest.approx(300)
    assert story.kept_s == pytest.approx(500.3 + 100)
    assert story.step == 60
    assert "relaunched in the allocation · 31 steps repeated, 5 min" in told(scribe.facts())
    assert "31 steps had to be repeated" in told(scribe.facts())


def test_falling_back_over_two_launches_counts_the_steps_of_both(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 50)
    scribe.save(50)
    scribe.train(51, 60)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, step=60)
    scribe.relaunch()
    scribe.resume(50)
    scribe.train(51, 70)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, step=70)
    scribe.relaunch()
    scribe.write(
        "rank0", ev.CheckpointRejected(name="step-00000050.a1.l1-00000000", reason="bad block")
    )
    scribe.resume(20)
    launches = explain(scribe.facts()).attempts[0].launches
    # 51-60 when launch 2 began; then 51-70 of launch 2 and 21-50 of launch 1.
    assert [launch.repeated_steps for launch in launches] == [10 + 30, 20, None]
    assert "did not resume from step-00000050.a1.l1-00000000: bad block" in told(scribe.facts())


def test_skipped_steps_with_their_samples_and_a_rollback(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 90)
    scribe.save(90)
    scribe.skip(91)
    scribe.train(92, 98)
    scribe.skip(99, count=3)
    scribe.incident(
        Cause.NON_FINITE,
        Action.ROLLBACK,
        text="3 steps in a row had a non-finite gradient",
        step=101,
        changes=(Change("lr_scale", "1", "0.5"),),
        plan=RecoveryPlan(lr_factor=0.5, lr_from_step=90, lr_ramp_steps=200),
    )
    scribe.relaunch()
    scribe.resume(90)
    scribe.skip(91)
    scribe.train(92, 110)
    text = told(scribe.facts())
    assert "  1 update skipped (step 91, samples 2880-2911)\n" in text
    assert "  1 update skipped (step 91, samples 2880-2911; undone by a rollback)\n" in text
    assert "  3 updates skipped (steps 99-101, samples 3136-3231; undone by a rollback)\n" in text
    assert (
        "    rolled back to step 90 · learning rate x1 → x0.5, back by step 290 · "
        "relaunched in the allocation\n"
        "    11 steps repeated, 70 s · 11 rank-minutes lost\n"
    ) in text
    # What was rolled back is not part of the result; what was skipped again is.  All that is listed
    # above is accounted for: one that counts, four that don't.
    assert (
        "Changes that affect your results:\n"
        "  learning rate lowered for 20 steps so far (x0.5 from step 90 on, back by step 290)\n"
        "  1 update skipped (step 91: 32 samples without effect; "
        "4 more skips undone by a rollback)\n"
        "  nothing else\n"
    ) in text


def test_a_learning_rate_that_is_not_back_before_the_end_says_how_far_it_comes(
    scribe: Scribe,
) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 260)
    scribe.incident(
        Cause.NON_FINITE,
        Action.ROLLBACK,
        step=260,
        changes=(Change("lr_scale", "1", "0.5"),),
        plan=RecoveryPlan(lr_factor=0.5, lr_from_step=250, lr_ramp_steps=200),
    )
    told_of = "learning rate to be lowered (x0.5 from step 250 on, back"
    assert f"  {told_of} up to x0.88 at the end, step 400)\n" in told(scribe.facts())
    assert f" {told_of} by step 450); nothing else.\n" in told(scribe.facts(total=None))
    scribe.relaunch()
    scribe.resume(250)
    scribe.train(251, 400)
    scribe.finish(400)
    assert (
        "  learning rate lowered for 150 steps "
        "(x0.5 from step 250 on, back up to x0.88 at the end, step 400)\n  nothing else\n"
    ) in told(scribe.facts())


def test_memory_and_micro_batch_are_not_science(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(
        Cause.CUDA_OOM,
        Action.SHRINK_MICRO_BATCH,
        text="CUDA out of memory",
        changes=(Change("micro_batch", "32", "16"), Change("exclude_nodes", "", "n01")),
        plan=RecoveryPlan(micro_batch=16),
    )
    scribe.requeued()
    text = told(scribe.facts())
    assert "    micro-batch 32 → 16, same global batch · excluding n01 · requeued\n" in text
    assert "Changes that affect your results: none.\n" in text
    assert (
        "micro-batch 32 → 16 with more accumulation, the same global batch throughout; "
        "nodes excluded: n01.\n"
    ) in text
    assert "micro_batch_size" not in text  # nobody knows yet whether it helps
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 2)
    assert "Next time: write micro_batch_size=16 in the program.\n" in told(scribe.facts())


def test_memory_that_did_not_do_is_no_lesson(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 3)
    changes = (Change("mem_factor", "1", "1.5"), Change("worker_factor", "1", "0.5"))
    plan = RecoveryPlan(mem_factor=1.5, worker_factor=0.5)
    scribe.incident(Cause.HOST_OOM, Action.RAISE_MEM, changes=changes, plan=plan, step=3)
    scribe.relaunch()
    scribe.resume(0)
    scribe.train(1, 5)
    lessons = " ".join(explain(scribe.facts()).next_time)
    assert "1.5 times the memory" in lessons and "fewer data-loader workers" in lessons
    next_ = "ask for more memory (slurm-forge requeue RUN --mem 2G), or use fewer workers"
    reason = f"host_oom: nothing left to try; next: {next_}"
    scribe.incident(Cause.HOST_OOM, Action.HOLD, plan=plan, step=6, reason=reason)
    scribe.held(reason)
    story = explain(scribe.facts())
    assert story.next_time == ()
    assert story.next == (next_.replace("RUN", "tiny-gpt"),)


def test_a_person_who_asks_for_more_memory_has_changed_something(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    verb = 'change resources.mem: was "1G", is "2G"'
    scribe.write("cli", ev.UserAsked(verb=verb, user="ada"), launch=1 << 30)
    text = told(scribe.facts())
    assert "Changes that affect your results: none.\n" in text
    assert 'Other changes: resources.mem: was "1G", is "2G", by ada.\n' in text


def test_a_run_that_trains_has_lost_nothing_since_its_last_word(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 5)
    story = explain(scribe.facts(after=300))
    assert story.goodput == pytest.approx(50 / 64)
    assert " lost " not in told(scribe.facts(after=300))
    # One that came to nothing, and is being started again, has.
    scribe.incident(Cause.CRASH, Action.RELAUNCH, step=5)
    scribe.relaunch()
    assert "lost 5 min" in told(scribe.facts(after=300))


def test_an_unknown_parameter_counts_as_science(scribe: Scribe) -> None:
    scribe.begin()
    changes = (Change("dropout", "0.1", "0.2"),)
    scribe.incident(Cause.LOSS_SPIKE, Action.RELAUNCH, changes=changes)
    assert "results: dropout 0.1 → 0.2; nothing else.\n" in told(scribe.facts())


def test_another_number_of_ranks_is_told_as_science(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 10)
    scribe.preempted(10)
    scribe.later(60).begin()
    scribe.resume(10, world_size=4, exact=False)
    assert "results: random states re-derived at step 10 (4 ranks, unlike" in told(scribe.facts())


def test_why_a_resume_is_not_exact_is_told(scribe: Scribe) -> None:
    scribe.begin()
    why = "DDP sums the gradients of the first step in another order"
    scribe.write("r0", ev.Resumed(step=10, checkpoint="x", world_size=8, exact=False, inexact=why))
    text = told(scribe.facts())
    assert f"results: resumed at step 10: {why}; nothing else.\n" in text
    assert f", {why}\n" in text and "re-derived" not in text


def test_what_every_resume_lacks_is_one_change(scribe: Scribe) -> None:
    for step in (0, 1000, 2000, 3000, 4000, 5000):
        scribe.later(60).begin()
        scribe.resume(step)
        if step:
            scribe.write("r0", ev.DataPositionMissing(step=step))
            scribe.write(
                "r0", ev.Resumed(step=step, checkpoint="x", world_size=8, data_restarted=True)
            )
        scribe.preempted(step + 1000)
    text = told(scribe.facts())
    where = "at steps 1000, 2000, 3000 and 2 more"
    assert text.count(f"resumed {where} without a data position: what the program derives") == 1
    assert text.count(f"the data began anew {where} (exact: false)") == 1


def test_random_states_that_a_fork_leaves_behind_are_told_once(scribe: Scribe) -> None:
    base = "step-00000400.a0.l0-00000000"
    scribe.write(
        "cli",
        ev.Forked(
            parent="/runs/base", checkpoint=base, digest="x", step=400, base=base, user="ada",
            fresh=("rng",),
        ),
    )  # fmt: skip
    scribe.begin()
    scribe.later(14).write(
        "rank0", ev.Resumed(step=400, checkpoint=base, world_size=1, exact=False)
    )
    scribe.train(401, 410)
    scribe.save(410)
    scribe.relaunch()
    scribe.resume(410, world_size=2, exact=False)
    text = told(scribe.facts())
    assert "fresh: rng" in text
    assert "re-derived at step 400" not in text
    assert "re-derived at step 410 (2 ranks, unlike the checkpoint)" in text


def test_ranks_that_differ_change_the_result_until_training_goes_back_behind_it(
    scribe: Scribe,
) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.save(20)
    scribe.train(21, 40)
    scribe.unstable(40, Action.HOLD, cause=Cause.RANK_MISMATCH, onset=21, rung=None)
    scribe.end("hold")
    line = "ranks that should be equal differ: found at step 40, begun at step 21 or later"
    assert line in told(scribe.facts())
    scribe.begin()
    scribe.resume(20)
    scribe.train(21, 22)
    assert "ranks that should be equal" not in told(scribe.facts())


def test_a_held_run_says_why_and_what_to_do(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 5)
    scribe.incident(
        Cause.APP_ERROR,
        Action.HOLD,
        text="ValueError: shapes do not fit",
        step=5,
        rung=None,
        reason="app_error: nothing left to try (relaunch used 1 times)",
    )
    scribe.end("hold")
    facts = scribe.facts(after=7200)
    text = told(facts)
    assert text.startswith("tiny-gpt   held   step 5 of 400   ")
    assert "held: app_error: nothing left to try (relaunch used 1 times)" in text
    assert "rank 0 on n01: ValueError: shapes do not fit   (likely)" in text
    assert (
        "Next: fix the error shown in the evidence, then slurm-forge requeue tiny-gpt.\n"
    ) in text
    assert "nothing to do" not in text
    # The two hours in which nobody cared are not the run's.
    assert explain(facts).elapsed_s == pytest.approx(14 + 50 + 1)


def test_a_cancelled_run(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(
        Cause.USER_CANCELLED,
        Action.STOP,
        source="scontrol",
        text="JobState=CANCELLED",
        rung=None,
        reason="the job was cancelled; it stays cancelled",
        confidence=Confidence.CERTAIN,
    )
    scribe.end("stop")
    text = told(scribe.facts())
    assert text.startswith("tiny-gpt   cancelled   ")
    assert "    stopped\n" in text
    assert "Next: to continue from the start: slurm-forge requeue tiny-gpt.\n" in text
    assert "Next time" not in text


def stopped(scribe: Scribe) -> None:
    """A person asks for a stop while the run starts."""
    scribe.incident(
        Cause.STOP_REQUESTED,
        Action.STOP,
        source="STOP",
        text="the file exists",
        rung=None,
        reason="a stop was requested",
        confidence=Confidence.CERTAIN,
    )
    scribe.end("stop")


def test_a_stop_after_a_hold_does_not_hide_what_was_wrong(scribe: Scribe) -> None:
    scribe.begin()
    scribe.incident(Cause.APP_ERROR, Action.HOLD, text="ValueError: no group", rung=None)
    scribe.end("hold")
    scribe.later(60).begin(job="8812400")
    stopped(scribe)
    text = told(scribe.facts())
    assert (
        "   stopped: a stop was requested; before that, in attempt 1, app_error: "
        "rank 0 on n01: ValueError: no group\n"
    ) in text
    assert "Next: fix the error shown in the evidence, then slurm-forge requeue" in text
    assert "Details: slurm-forge explain tiny-gpt --attempt 1   (or 2)\n" in text


def test_what_training_has_got_past_is_not_held_against_a_stopped_run(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.save(10)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, step=20)
    scribe.relaunch()
    scribe.resume(10)
    scribe.train(11, 21)
    stopped(scribe)
    text = told(scribe.facts())
    assert "   stopped: a stop was requested\n" in text
    assert "Next: to continue from the last checkpoint: slurm-forge requeue tiny-gpt.\n" in text


def test_where_the_output_of_a_failed_launch_lies(scribe: Scribe) -> None:
    scribe.begin(job="local-77", via="submitit local")
    scribe.incident(Cause.APP_ERROR, Action.HOLD, rung=None)  # of rank 0
    scribe.end("hold")
    local = tuple(f"runs/x/77_{rank}_log.{kind}" for rank in (0, 1) for kind in ("err", "out"))
    facts = replace(scribe.facts(), logs=("runs/x/770_0_log.err", *local))
    assert "  output: runs/x/77_0_log.err\n" in told(facts)
    assert "  output: runs/x/77_0_log.out\n" in told(replace(facts, logs=(local[1],)))
    # Nothing of its own: the other ranks' is better than nothing.
    assert "  output: runs/x/77_1_log.err\n" in told(replace(facts, logs=local[2:]))
    assert "output:" not in told(replace(facts, logs=("runs/x/tiny-gpt-77.out.bak",)))


def test_the_output_of_a_batch_job_and_of_ranks_that_nobody_named(scribe: Scribe) -> None:
    scribe.begin(job="5")
    scribe.resume(0)
    scribe.later(60).begin(job="6")
    batch = ("runs/x/tiny-gpt-5.out", "runs/x/tiny-gpt-15.out")
    text = told(replace(scribe.facts(), logs=batch))
    assert "  ended unexpectedly" in text
    assert text.count("output:") == 1  # the attempt that is alive needs none
    assert "  output: runs/x/tiny-gpt-5.out\n" in text
    ranks = tuple(f"logs/5_{rank}_log.err" for rank in range(3))
    assert "  output: logs/5_*_log.err\n" in told(replace(scribe.facts(), logs=ranks))


def test_a_run_that_nothing_happened_to_has_lost_nothing(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 400)
    scribe.save(400)
    scribe.finish(400)
    assert "   goodput 99.6 %   start-up 14 s of 67 min\n" in told(scribe.facts())


def test_the_end_of_a_finished_run_is_not_called_lost(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 40)
    scribe.later(20).finish(40)
    assert "   start-up 14 s, shutdown 21 s of 7 min 15 s\n" in told(scribe.facts())


def test_a_run_that_starts_has_lost_nothing_yet(scribe: Scribe) -> None:
    scribe.begin()
    assert "   start-up 8.0 s of 8.0 s\n" in told(scribe.facts(after=8))
    scribe.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    scribe.later(8).end("hold")
    assert "   lost 9.0 s of 9.0 s\n" in told(scribe.facts())


def test_a_run_that_is_going_on(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 50)
    scribe.save(50)
    facts = scribe.facts(after=3)
    assert told(facts).startswith("tiny-gpt   running   step 50 of 400   1 attempt, 1 launch   ")
    assert (
        "  running   step 50, last heard from 3.0 s ago   "
        "1 checkpoint, the last at step 50, 0.3 s each\n"
    ) in told(facts)
    assert "Details:" not in told(facts)
    assert "\nNext: nothing to do; to watch it: slurm-forge status tiny-gpt --follow.\n" in told(
        facts
    )


def test_an_attempt_that_went_without_a_word(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 50)
    scribe.save(50)
    scribe.later(600).begin()
    scribe.resume(50)
    text = told(scribe.facts())
    assert "  ended unexpectedly, last heard from at 09:08:34\n" in text
    assert text.count("ended unexpectedly") == 1
    assert "waited 10 min in the queue" in text


def test_a_start_that_fails_is_no_sign_of_life_of_the_attempt_before(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 50)
    before = told(scribe.facts())
    scribe.later(3600)
    monkeypatch.setattr("slurm_forge.launch.attempt.failed_start.time.time", lambda: scribe.now)
    error = ConfigError("no such module", next_step="Load it.")
    report_failed_start(scribe.run, {"SLURM_JOB_ID": "41"}, error, FakeSlurm())
    facts = scribe.facts(after=60)
    (attempt,) = explain(facts).attempts
    assert attempt.last_seen == scribe.now - 3600
    assert "note: job 41 could not start on " in told(facts)
    assert take_status(facts).words == "running, but silent for 61 min"
    scribe.later(60).begin()
    assert "ended unexpectedly, last heard from at 09:08:34" in told(scribe.facts())
    assert "last heard from 09:08:34" not in before


def test_no_journal_at_all(scribe: Scribe) -> None:
    text = told(scribe.facts())
    assert text.startswith("tiny-gpt   new\n   not started yet\n")
    assert "no attempt has been started yet" in text


def test_damage_is_told_and_the_rest_is_read(scribe: Scribe) -> None:
    preempted_and_finished(scribe)
    path = sorted(scribe.run.journal.glob("1-supervisor-*"))[1]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b'{"torn\x1b[31m\n' + b"".join(lines[1:]))
    text = told(scribe.facts())
    assert f"   warning: damaged line ignored: {path.name}, line 1: " in text
    assert "preempted        09:20:00" in text
    assert "\x1b" not in text


def test_a_decision_whose_incident_was_lost_is_still_told(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(Cause.HANG, Action.RELAUNCH)
    for path in scribe.run.journal.iterdir():
        kept = [x for x in path.read_bytes().splitlines(True) if b'"kind":"incident"' not in x]
        path.write_bytes(b"".join(kept))
    scribe.relaunch()
    text = told(scribe.facts())
    assert "no evidence   (its evidence was lost)" in text
    assert "    relaunched in the allocation\n" in text


def test_a_successor_and_a_requeue_that_slurm_did_not_take(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(Cause.PREEMPTED, Action.REQUEUE)
    method = "sbatch --dependency=afterany"
    scribe.write("supervisor", ev.RequeueIntended(job="8812301", method=method, reason="disabled"))
    scribe.write("supervisor", ev.RequeueDone(job="8812301", method=method, successor="8812399"))
    scribe.end("successor")
    assert "successor job 8812399 submitted" in told(scribe.facts())
    scribe.later(5).begin(job="8812399")
    scribe.resume(0)
    scribe.incident(Cause.PREEMPTED, Action.REQUEUE)
    scribe.write(
        "supervisor", ev.RequeueIntended(job="8812399", method="scontrol requeue", reason="p")
    )
    scribe.write(
        "supervisor",
        ev.RequeueFailed(job="8812399", method="scontrol requeue", reason="Socket timed out"),
    )
    scribe.end("open")
    text = told(scribe.facts())
    assert "scontrol requeue failed: Socket timed out" in text
    assert "requeue failed" in text
    assert "   waiting for a requeue that Slurm has not confirmed\n" in text
    assert "requeue that Slurm has not confirmed: slurm-forge reconcile tiny-gpt" in text


def test_a_stop_whose_save_came_too_late(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 30)
    scribe.save(20, seconds=7.0)
    scribe.preempted(31, saves=False)
    scribe.later(60).begin()
    scribe.resume(20)
    text = told(scribe.facts())
    assert "the final checkpoint was not committed in time · requeued · 11 steps repeated" in text
    # A lead is before the end of a time limit: it does not lengthen the grace of a preemption.
    assert "lead" not in text
    late = "a final save did not finish within the grace period (saves take up to 7.0 s)"
    assert f"save more often (checkpoint.every_minutes): {late}" in text


def test_probes_and_a_late_rank(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.write("supervisor", ev.ProbeMeasured(ok=True, step=5, latency_s=0.012, count=30))
    scribe.write(
        "supervisor",
        ev.ProbeMeasured(ok=False, step=9, late_ranks=(4, 5), late_hosts=("n06", "n06\x1b[1m")),
    )
    scribe.incident(Cause.HANG, Action.RELAUNCH, source="probe", text="late: rank 4 (n06)")
    assert "probe failed, late: rank 4 (n06), rank 5 (n06?[1m)" in told(scribe.facts())
    assert "  at least 30 probes passed, the slowest in 12 ms\n" in told(scribe.facts(), attempt=1)


def test_a_probe_whose_values_arrived_changed_and_one_that_broke(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    fine = ev.ProbeMeasured(ok=True, step=5, latency_s=0.012, bandwidth=1.18e10)
    scribe.write("supervisor", fine)
    scribe.write("supervisor", ev.ProbeOff(step=7, why="rank 1: Connection reset\x1b[1m"))
    assert "training continues without it" in status_text(take_status(scribe.facts()))
    wrong = ev.ProbeMeasured(ok=False, step=9, late_ranks=(4,), late_hosts=("n06",), wrong=True)
    scribe.write("supervisor", wrong)
    text = told(scribe.facts(), attempt=1)
    assert "probe failed, values corrupted: rank 4 (n06)" in text
    assert "at least 1 probe passed, the slowest in 12 ms, 12 GB/s over all ranks" in text
    assert (
        "the probe failed and training continued without it: rank 1: Connection reset?[1m" in text
    )


def test_one_attempt_in_full(scribe: Scribe) -> None:
    preempted_and_finished(scribe)
    text = told(scribe.facts(), attempt=1)
    assert "attempt 2" not in text
    assert "  09:19:54  notice: SIGTERM (rank 3)\n" in text
    assert "all ranks agreed to stop at step 100 within 3 ms" in text
    assert "  09:20:00  saved step-00000100.a1.l1-00000000 in 4.1 s (stop)\n" in text
    assert "    decided: preempted: requeue\n" in text
    story = only_attempt(explain(scribe.facts()), 1)
    assert story is not None
    assert [one.number for one in story.attempts] == [1]
    assert only_attempt(explain(scribe.facts()), 3) is None


def test_long_evidence_is_cut_in_the_whole_story_only(scribe: Scribe) -> None:
    scribe.begin()
    scribe.incident(Cause.CRASH, Action.RELAUNCH, text="x" * 1000)
    assert "x" * 1000 not in told(scribe.facts())
    assert "x" * 1000 in told(scribe.facts(), attempt=1)


def test_a_superseded_attempt_is_left_out_and_told(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 5)
    scribe.later(60).begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.attempt = 1  # an incarnation that Slurm had lost sight of
    scribe.later(300).train(6, 9)
    scribe.incident(Cause.CRASH, Action.HOLD)
    facts = scribe.facts()
    assert explain(facts).step == 20
    assert "3 lines that attempt 1 wrote after a newer one had taken over are ignored" in told(
        facts
    )


def test_one_line_of_a_superseded_attempt(scribe: Scribe) -> None:
    scribe.begin()
    scribe.later(60).begin()
    scribe.attempt = 1
    scribe.later(1).write("supervisor", ev.LaunchEnded(outcome="crash"))
    words = "1 line that attempt 1 wrote after a newer one had taken over is ignored"
    assert words in told(scribe.facts())


def test_clocks_that_differ_between_attempts_are_told(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 5)
    assert "clocks" not in told(scribe.facts())
    scribe.later(-3600).begin()
    assert "the clocks of attempts 1 and 2 differ by at least" in told(scribe.facts())


def test_time_held_is_not_time_in_the_queue(scribe: Scribe) -> None:
    scribe.begin()
    scribe.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    scribe.end("hold")
    scribe.later(100_000).write(
        "cli", ev.UserAsked(verb="requeue", user="somebody"), launch=1 << 30
    )
    scribe.submitted("8812400")
    scribe.later(40).begin(job="8812400")
    story = explain(scribe.facts())
    assert story.attempts[1].waited_s == 40
    assert [(act.verb, act.user, act.job) for act in story.acts] == [
        ("requeue", "somebody", None),
        ("submit", None, "8812400"),
    ]


def test_a_local_run_between_two_attempts(scribe: Scribe) -> None:
    scribe.begin(job="local-1", via="submitit local")
    scribe.resume(0)
    scribe.train(1, 5)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, step=5)
    scribe.end("requeued")  # nobody asked Slurm: no RequeueDone
    text = told(scribe.facts(after=2))
    assert text.startswith("tiny-gpt   requeued   ")
    assert "    requeued · 5 steps not saved\n" in text


def test_a_request_to_save_is_no_notice_to_stop(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.write("supervisor", ev.NoticeSeen(what="SAVE", source="file"))
    scribe.save(5, reason="SAVE file")
    scribe.later(1000).preempted(100)
    launch = explain(scribe.facts()).attempts[0].launches[0]
    assert launch.stop_checkpoint is not None
    assert launch.stop_checkpoint.event.step == 100
    assert launch.notice_to_saved_s == pytest.approx(6.1, abs=0.01)


def test_skips_with_other_samples_between_are_not_put_together(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    for step, first in ((7, 192), (8, 224), (9, 512)):
        scribe.write(
            "rank0", ev.StepSkipped(step=step, first_sample=first, samples=32, consecutive=1)
        )
    text = told(scribe.facts())
    assert "  2 updates skipped (steps 7-8, samples 192-255)\n" in text
    assert "  1 update skipped (step 9, samples 512-543)\n" in text


def test_a_run_that_is_just_stopping_is_not_blamed_for_a_late_save(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.write("supervisor", ev.NoticeSeen(what="SIGTERM", source="rank 0"))
    scribe.write("supervisor", ev.StopAgreed(step=3, seconds=0.01))
    text = told(scribe.facts())
    assert "Next: nothing to do; " in text
    assert "more time" not in text
    assert "not committed" not in text


def test_the_same_line_twice_is_read_once(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    facts = scribe.facts()
    twice = replace(facts, records=facts.records + facts.records)
    assert told(twice) == told(facts)


def test_the_time_behind_an_open_intent_is_waited_and_nothing_runs(scribe: Scribe) -> None:
    scribe.submitted()
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 18)
    # A supervisor that is killed says nothing of its launch; who found out wrote the end.
    method = "scontrol requeue"
    intent = ev.RequeueIntended(job="8812301", method=method, reason="preempted")
    scribe.write("supervisor", intent)
    scribe.end("open")
    facts = scribe.facts(after=5.5 * 3600)
    story = explain(facts)
    assert (story.status, story.queued_s) == ("requeued", 5.5 * 3600)
    shown = told(facts)
    assert "waiting 5 h 30 min" in shown and "lost" not in shown.splitlines()[0]
    assert "running" not in shown
    assert "slurm-forge reconcile tiny-gpt" in shown


def test_who_brought_it_back_in_the_place_of_a_killed_supervisor(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.incident(Cause.CRASH, Action.REQUEUE, step=20)
    method = "scontrol requeue"
    scribe.write("deputy", ev.RequeueIntended(job="8812301", method=method, reason="x"))
    scribe.write("deputy", ev.RequeueDone(job="8812301", method=method))
    scribe.write("deputy", ev.AttemptEnded(outcome="requeued"))
    assert "rank 0 requeued it for the dead supervisor" in told(scribe.facts())
    (one,) = explain(scribe.facts()).attempts
    assert {comeback.by for comeback in one.comebacks} == {"deputy"}


def test_of_a_command_whose_ranks_are_a_run_their_number_is_told(scribe: Scribe) -> None:
    scribe.submitted()
    scribe.begin("n01", "n02")
    scribe.launch -= 1
    scribe.relaunch(world_size=0)
    scribe.resume(0, world_size=2)
    assert "launch 1   2 ranks   from the start" in told(scribe.facts())
