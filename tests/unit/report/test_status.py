"""One screen about a run, in every state it can be in."""

from __future__ import annotations

from datetime import timezone
from pathlib import Path

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.status import take_status
from slurm_forge.report.status.status_text import status_text
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from slurm_forge.vocabulary.plan import RecoveryPlan
from slurm_forge.vocabulary.trust import Trust
from tests.unit.report.journals import Scribe


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path)


def screen(facts: RunFacts) -> dict[str, str]:
    """Label to value; several lines of one label are joined."""
    found: dict[str, str] = {}
    for line in status_text(take_status(facts), zone=timezone.utc).splitlines():
        label, value = line[:11].strip(), line[12:]
        found[label] = f"{found[label]} | {value}" if label in found else value
    return found


def test_a_run_in_training(scribe: Scribe) -> None:
    scribe.submitted()
    scribe.later(60).begin("n01", "n02", "n03")
    scribe.resume(0)
    scribe.train(1, 50)
    scribe.save(50)
    scribe.train(51, 100)
    shown = screen(scribe.facts(after=4))
    assert shown == {
        "run": f"tiny-gpt   {scribe.run.path}",
        "status": "running: training",
        "job": "8812301",
        "attempt": "1, launch 1, 8 ranks, on n[01-03]",
        "step": "100 of 400 (25.0 %)",
        "checkpoint": "step 50, 8 min 24 s ago (09:09:34)   step-00000050.a1.l1-00000000",
        "last heard": "4.0 s ago",
        "next": "nothing to do; to watch it: slurm-forge status tiny-gpt --follow",
    }


def test_how_far_the_last_checkpoint_is_trusted(scribe: Scribe) -> None:
    scribe.submitted()
    scribe.begin()
    scribe.resume(0)
    scribe.save(50)
    assert "good" not in screen(scribe.facts())["checkpoint"]
    scribe.judge(50, Trust.GOOD, "20 healthy steps followed")
    scribe.save(100, findings=("NaN in models/model/head.weight",))
    shown = screen(scribe.facts())["checkpoint"]
    assert "step 100" in shown
    assert "suspect (NaN in models/model/head.weight), good up to step 50" in shown


def test_a_run_that_was_never_started(scribe: Scribe) -> None:
    shown = screen(scribe.facts())
    assert shown["status"] == "new: not started yet"
    assert shown["checkpoint"] == "none yet"
    assert "slurm-forge requeue tiny-gpt" in shown["next"]


def test_a_submitted_run(scribe: Scribe) -> None:
    scribe.submitted()
    shown = screen(scribe.facts())
    assert shown["status"] == "submitted, waiting to start"
    assert "squeue -j 8812301" in shown["next"]


def test_a_requeued_run(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.preempted(20)
    shown = screen(scribe.facts(after=180))
    assert shown["status"] == "requeued 3 min ago, waiting to start again"
    assert shown["step"].startswith("20 of 400")
    assert "last heard" not in shown


def test_a_starting_run_is_not_training(scribe: Scribe) -> None:
    scribe.begin()
    assert screen(scribe.facts())["status"] == "running: starting"


def test_a_stopping_run(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.write("supervisor", ev.StopAgreed(step=3, seconds=0.01))
    assert screen(scribe.facts())["status"] == "running: stopping"


def test_a_run_that_says_nothing_any_more(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    shown = screen(scribe.facts(after=3 * 3600))
    assert shown["status"] == "running, but silent for 3 h"
    assert shown["next"].startswith("see whether it is alive: squeue -j 8812301")


def test_a_held_run_shows_the_reason_and_the_way_on(scribe: Scribe) -> None:
    scribe.begin()
    scribe.incident(Cause.HANG, Action.HOLD, rung=None, reason="hang: nothing left to try")
    scribe.end("hold")
    shown = screen(scribe.facts())
    assert shown["status"] == "held: hang: nothing left to try"
    assert shown["next"] == (
        "see why: slurm-forge explain tiny-gpt | then, to continue: slurm-forge requeue tiny-gpt"
    )


def test_a_held_local_run_goes_on_where_it_was_started(scribe: Scribe) -> None:
    scribe.begin(job="local-12", via="submitit local")
    scribe.incident(Cause.HANG, Action.HOLD, rung=None)
    scribe.end("hold")
    assert "slurm-forge run tiny-gpt" in screen(scribe.facts())["next"]


def test_the_plan_in_force_is_shown_only_where_it_changes_something(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 100)
    plan = RecoveryPlan(
        lr_factor=0.5,
        lr_from_step=100,
        lr_ramp_steps=100,
        micro_batch=16,
        mem_factor=1.5,
        exclude_nodes=("n06", "n07"),
    )
    scribe.incident(Cause.NON_FINITE, Action.ROLLBACK, plan=plan)
    scribe.relaunch()
    scribe.resume(100)
    scribe.train(101, 150)
    assert screen(scribe.facts())["changed"] == (
        "rolled back to step 100, learning rate x0.75, back by step 200; "
        "micro-batch 16 (same global batch); memory request x1.5; "
        "excluding n[06-07]"
    )
    scribe.train(151, 200)
    assert screen(scribe.facts())["changed"].startswith("micro-batch 16 ")


def test_an_open_intent_is_open_whatever_else(scribe: Scribe) -> None:
    scribe.begin()
    scribe.incident(Cause.PREEMPTED, Action.REQUEUE)
    method = "scontrol requeue"
    scribe.write("supervisor", ev.RequeueIntended(job="88", method=method, reason="preempted"))
    scribe.write("supervisor", ev.RequeueFailed(job="88", method=method, reason="timed out"))
    scribe.end("open")
    shown = screen(scribe.facts())
    assert shown["status"] == "requeued: waiting for a requeue that Slurm has not confirmed"
    assert shown["open"] == "scontrol requeue of job 88 (preempted)"
    assert shown["next"].endswith("slurm-forge reconcile tiny-gpt")


def test_a_person_who_asks_for_the_run_to_go_on_settles_what_was_left_open(scribe: Scribe) -> None:
    scribe.submitted()
    scribe.begin()
    scribe.incident(Cause.PREEMPTED, Action.REQUEUE)
    intent = ev.RequeueIntended(job="8812301", method="scontrol requeue", reason="preempted")
    scribe.write("supervisor", intent)
    scribe.end("open")
    scribe.later(60).write("cli", ev.UserAsked(verb="requeue", user="x"), launch=1 << 30)
    scribe.submitted("999")
    shown = screen(scribe.facts())
    assert shown["status"] == "submitted, waiting to start"
    assert "open" not in shown
    assert "reconcile" not in shown["next"] and "squeue -j 999" in shown["next"]


def test_of_very_many_nodes_some_are_shown(scribe: Scribe) -> None:
    scribe.begin(*(f"n{number:04}" for number in range(1, 2000, 3)))
    shown = screen(scribe.facts())["attempt"]
    assert "on n[0001,0004," in shown and "more nodes" in shown
    assert len(shown) < 140
    assert len(take_status(scribe.facts()).nodes) == 667


def test_a_program_keeps_its_own_checkpoints(scribe: Scribe) -> None:
    scribe.begin(job="exec-7")
    scribe.launch -= 1
    scribe.relaunch(world_size=0)
    assert screen(scribe.facts())["status"] == "running: its program is running"
    assert screen(scribe.facts())["progress"] == "none seen yet"
    scribe.write("supervisor", ev.Advanced(what="out/checkpoint-31", step=31))
    scribe.incident(Cause.STOP_REQUESTED, Action.STOP)
    shown = screen(scribe.facts())
    assert shown["progress"] == "out/checkpoint-31"
    assert "checkpoint" not in shown, "none of ours is no loss"
    assert shown["next"] == "to continue: the same slurm-forge exec again"


def test_stop_and_save_files_are_open_requests(scribe: Scribe) -> None:
    scribe.begin()
    scribe.run.stop_file.touch()
    scribe.run.save_file.touch()
    assert screen(scribe.facts())["open"] == (
        "STOP file: the run saves, stops, and is not started again"
        " | SAVE file: the run saves at its next step"
    )
    scribe.run.save_file.unlink()
    scribe.incident(Cause.STOP_REQUESTED, Action.STOP)
    scribe.end("stopped")
    assert "open" not in screen(scribe.facts())  # it has done so


def test_done_counts_even_where_the_journal_lost_its_last_line(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 400)
    scribe.run.mark_done(400, 1)
    shown = screen(scribe.facts(after=7200))
    assert shown["status"] == "finished"
    assert shown["next"].startswith("nothing to do")


def test_a_finished_run_has_no_plan_in_force(scribe: Scribe) -> None:
    scribe.begin()
    scribe.incident(Cause.CUDA_OOM, Action.RELAUNCH, plan=RecoveryPlan(micro_batch=2))
    scribe.relaunch()
    scribe.resume(0)
    scribe.train(1, 400)
    scribe.finish(400)
    assert "changed" not in screen(scribe.facts())


def test_problems_of_reading_are_warnings(scribe: Scribe) -> None:
    facts = RunFacts(
        name="x", path="/x", reference="x", now=0.0, problems=("run.yaml can't be read\x1b[2J",)
    )
    assert screen(facts)["warning"] == "run.yaml can't be read?[2J"


def test_a_step_beyond_the_total_is_no_percentage(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 60)
    assert screen(scribe.facts(total=50))["step"] == "60 of 50"


def test_the_newest_of_every_logged_figure_is_shown(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.write("rank0", ev.Logged(step=10, values={"loss": 3.0, "val_loss": 3.25}))
    scribe.later(5).write("rank0", ev.Logged(step=11, values={"loss": 2.0, "acc\x1b": 0.123456}))
    assert screen(scribe.facts())["logged"] == (
        "loss 2, acc? 0.1235 (step 11); val_loss 3.25 (step 10)"
    )


def test_figures_of_steps_that_were_undone_are_not_shown(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.write("rank0", ev.Logged(step=10, values={"loss": 3.0}))
    scribe.save(20)
    scribe.write("rank0", ev.Logged(step=30, values={"val_loss": 9.0}))
    scribe.incident(Cause.NON_FINITE, Action.ROLLBACK, step=30)
    scribe.relaunch()
    scribe.resume(20)
    assert screen(scribe.facts())["logged"] == "loss 3 (step 10)"


def test_many_figures_stay_one_line(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.write("rank0", ev.Logged(step=1, values={f"m{n}": 1.0 for n in range(12)}))
    assert screen(scribe.facts())["logged"].endswith("m7 1 (step 1); 4 more")


def test_a_stopped_run_still_shows_what_was_wrong_before(scribe: Scribe) -> None:
    scribe.begin(job="local-12", via="submitit local")
    scribe.incident(Cause.APP_ERROR, Action.HOLD, text="ValueError: x", rung=None)
    scribe.end("hold")
    scribe.later(9).begin(job="local-13", via="submitit local")
    scribe.incident(Cause.STOP_REQUESTED, Action.STOP, rung=None, reason="somebody asked")
    scribe.end("stop")
    shown = screen(scribe.facts())
    assert shown["status"] == (
        "stopped: somebody asked; before that, in attempt 1, app_error: "
        "rank 0 on n01: ValueError: x"
    )
    assert shown["next"] == (
        "see what went wrong before that: slurm-forge explain tiny-gpt | "
        "then, to continue from the start: slurm-forge run tiny-gpt"
    )


def test_a_run_that_is_asked_to_stop_says_how_to_go_on_later(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.run.stop_file.touch()
    assert screen(scribe.facts())["next"].endswith(
        "later, to continue: slurm-forge requeue tiny-gpt"
    )


def test_an_unknown_total_is_no_percentage(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 1234, seconds=0.01)
    assert screen(scribe.facts(total=None))["step"] == "1234"


FULL = (
    "no room for a checkpoint of 3G: 1G free\n  Make room, or keep fewer (checkpoint.keep_last, "
    "slurm-forge checkpoints prune). Training continues, and the next save tries again."
)


def test_saves_that_fail_in_a_row(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 10)
    scribe.save(10)
    for step in range(20, 100, 10):
        scribe.train(step - 9, step)
        scribe.write("rank0", ev.CheckpointFailed(step=step, reason=FULL))
    shown = screen(scribe.facts(after=4))
    assert shown["status"] == (
        "running: training, but the last 8 saves failed: no room for a checkpoint of 3G: 1G free"
    )
    assert shown["saves"] == (
        "8 in a row failed since 09:03:34: no room for a checkpoint of 3G: 1G free; "
        "80 steps since step 10 at risk"
    )
    assert "quota and free space" in shown["next"]
    assert "nothing to do" not in shown["next"]
    text = explain_text(
        explain(scribe.facts(after=4)), now=scribe.now, reference="tiny-gpt", zone=timezone.utc
    )
    lines = [line for line in text.splitlines() if "failed: no room" in line]
    assert lines[-1].strip() == (
        "09:03:34  8 saves in a row, at steps 20 to 90, failed: "
        "no room for a checkpoint of 3G: 1G free"
    )
    assert "saves: 8 in a row failed since" in text
    scribe.save(100)
    assert "saves" not in screen(scribe.facts())


@pytest.mark.parametrize("ahead", [3600, 0, -3600])
def test_saves_that_fail_in_a_row_are_counted_whatever_the_nodes_clocks_say(
    scribe: Scribe, ahead: int
) -> None:
    scribe.ahead = ahead
    scribe.begin()
    scribe.resume(0)
    scribe.train(19_999, 20_000)
    scribe.save(20_000)
    scribe.ahead = 0
    scribe.later(60).begin()
    scribe.resume(20_000)
    scribe.train(20_001, 20_001)
    for _ in range(2):
        scribe.later(60).write("rank0", ev.CheckpointFailed(step=20_001, reason=FULL))
    shown = screen(scribe.facts())
    assert "but the last 2 saves failed" in shown["status"]
    assert shown["saves"].endswith("1 step since step 20000 at risk")
    assert ": 1 step since step 20000 is at risk" in shown["next"]
    scribe.ahead = ahead
    scribe.later(60).begin()
    scribe.resume(20_000)
    scribe.train(20_001, 20_002)
    scribe.save(20_002)
    assert "saves" not in screen(scribe.facts())


def test_a_chain_of_jobs_is_told_in_the_order_of_its_attempts(scribe: Scribe) -> None:
    """Whatever the clocks of their nodes say."""
    scribe.submitted("12")
    for job, ahead in (("12", 7200), ("13", 0), ("14", -7200)):
        scribe.ahead = ahead
        scribe.later(60).begin(job=job)
    assert screen(scribe.facts())["job"] == "14   (jobs 12 → 13 → 14)"
