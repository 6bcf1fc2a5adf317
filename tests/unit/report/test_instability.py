"""The story of an instability or of too little memory, as somebody reads it at two in the night."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timezone
from pathlib import Path

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.report.encoding import to_json
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.event_lines import happening
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.status import take_status
from slurm_forge.report.status.status_text import status_text
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Change
from slurm_forge.vocabulary.plan import RecoveryPlan, SampleWindow
from slurm_forge.vocabulary.trust import Trust
from tests.unit.report.journals import Scribe

IN_A_ROW = Evidence("all ranks", "3 steps in a row had a non-finite gradient")
WHERE = Evidence("rank 9 (n05)", "gradient of layers.11.mlp.w2 is NaN (1 of 40 gradients)")
TRANSIENT = Evidence("replay", "the same step computed again is finite: transient; suspect n05")
DATA = Evidence(
    "replay",
    "the same step computed again is not finite either: data; samples 3136-3167; "
    "dataset[17], [4711] of epoch 0",
)
OOM = Evidence("rank 0 on n01", "CUDA out of memory. Tried to allocate 20.00 GiB")
HALVED = Change("lr_scale", "1", "0.5")


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path)


def told(facts: RunFacts, attempt: int | None = None) -> str:
    return explain_text(
        explain(facts), now=facts.now, reference="tiny-gpt", zone=timezone.utc, attempt=attempt
    )


def changed(facts: RunFacts) -> str | None:
    """The line of ``status`` about what is not as it would be."""
    lines = status_text(take_status(facts), zone=timezone.utc).splitlines()
    return next((line[12:] for line in lines if line.startswith("changed ")), None)


def trained(scribe: Scribe, last: int = 98) -> None:
    """A good checkpoint of step 90, one of 95 that nobody knows to be good, then ``last``."""
    scribe.begin("n01", "n05")
    scribe.resume(0)
    scribe.train(1, 90)
    scribe.save(90)
    scribe.train(91, 95)
    scribe.judge(90, Trust.GOOD)
    scribe.save(95)
    scribe.train(96, last)


def passed_over(scribe: Scribe, step: int) -> None:
    reason = f"not known to be good yet when non_finite began at step {step + 1}"
    name = f"step-{step:08d}.a1.l1-00000000"
    scribe.write("rank0", ev.CheckpointRejected(name=name, reason=reason))


def poisoned(scribe: Scribe) -> None:
    """Bad data behind sample 3136: 96 samples skipped, then 384, as they were not enough."""
    trained(scribe)
    scribe.skip(99, count=3, first=3136, evidence=(WHERE, DATA), seconds=10)
    scribe.unstable(
        101,
        Action.ROLLBACK,
        onset=99,
        evidence=(IN_A_ROW, WHERE, DATA),
        repeats=True,
        changes=(HALVED, Change("skipped_samples", "-", "3136-3231")),
        plan=RecoveryPlan(
            lr_factor=0.5,
            lr_from_step=90,
            lr_ramp_steps=200,
            skipped=(SampleWindow(3136, 3232),),
        ),
        target=90,
    )
    passed_over(scribe, 95)
    scribe.again(90)
    scribe.train(91, 98)
    scribe.skip(99, count=3, first=3232, seconds=10)
    second = scribe.unstable(
        101,
        Action.ROLLBACK,
        onset=99,
        evidence=(IN_A_ROW,),
        changes=(
            Change("lr_scale", "0.5275", "0.25"),
            Change("skipped_samples", "3136-3231", "3136-3519"),
        ),
        plan=RecoveryPlan(
            lr_factor=0.25,
            lr_from_step=90,
            lr_ramp_steps=211,
            skipped=(SampleWindow(3136, 3520),),
        ),
        target=90,
    )
    scribe.again(90)
    scribe.train(91, 102)
    scribe.recovered(second, 11, 120.4)


def test_a_fault_that_does_not_come_again(scribe: Scribe) -> None:
    trained(scribe)
    scribe.skip(99, count=3, evidence=(WHERE, TRANSIENT), seconds=10)
    name = scribe.unstable(
        101,
        Action.ROLLBACK,
        onset=99,
        evidence=(IN_A_ROW, WHERE, TRANSIENT),
        repeats=False,
        hosts=("n05",),
        target=90,
    )
    passed_over(scribe, 95)
    scribe.again(90)
    scribe.train(91, 102)
    scribe.recovered(name, 11, 120.4)
    scribe.train(103, 400)
    scribe.save(400)
    scribe.finish(400)
    facts = scribe.facts()
    assert told(facts) == (
        "tiny-gpt   finished   step 400 of 400   1 attempt, 1 launch   goodput 97.0 %   "
        "start-up 14 s, lost 1 min 51 s of 69 min\n"
        "\n"
        "attempt 1   job 8812301   n[01,05]   Tue 11 Aug 09:00 → 10:08\n"
        "  launch 1   8 ranks   from the start, training after 14 s "
        "(interpreter 8.0 s, rendezvous 2.1 s, load 3.1 s)\n"
        "  non_finite       09:17:04   steps 99-101   "
        "all ranks: 3 steps in a row had a non-finite gradient   (certain)\n"
        "    rank 9 (n05): gradient of layers.11.mlp.w2 is NaN (1 of 40 gradients)\n"
        "    replay: the same step computed again is finite: transient; suspect n05\n"
        "    3 updates skipped · rolled back to step 90 (good) without a restart · "
        "11 steps repeated, 1 min 50 s\n"
        "    15 rank-minutes lost\n"
        "  finished at step 400   10:08:45   3 checkpoints, the last at step 400, 0.3 s each\n"
        "\n"
        "What it cost: 15 rank-minutes lost (11 steps repeated).\n"
        "Changes that affect your results: none.\n"
        "Next time: save more often (checkpoint.every_minutes): 11 steps had to be repeated.\n"
        "Details: slurm-forge explain tiny-gpt --attempt 1\n"
    )
    story = explain(facts)
    (incident,) = story.attempts[0].launches[0].incidents
    assert (incident.repeated_steps, incident.lost_s) == (11, 120.4)
    assert (incident.resumed_step, incident.recovered) == (90, True)
    # What was thrown away: 5 + 3 steps, the save of step 95 and the three that were skipped.
    assert story.repeated_steps == 11
    assert story.repeated_s == pytest.approx(110.3, abs=0.2)
    assert story.kept_s == pytest.approx(400 * 10 + 0.6, abs=0.2)


def test_poisoned_data_with_two_rollbacks(scribe: Scribe) -> None:
    poisoned(scribe)
    facts = scribe.facts(total=20_000)
    assert told(facts) == (
        "tiny-gpt   running   step 102 of 20000   1 attempt, 1 launch   goodput 81.3 %   "
        "start-up 14 s, lost 3 min 41 s of 21 min\n"
        "   training\n"
        "\n"
        "attempt 1   job 8812301   n[01,05]   Tue 11 Aug 09:00\n"
        "  launch 1   8 ranks   from the start, training after 14 s "
        "(interpreter 8.0 s, rendezvous 2.1 s, load 3.1 s)\n"
        "  non_finite       09:17:04   steps 99-101   "
        "all ranks: 3 steps in a row had a non-finite gradient   (certain)\n"
        "    rank 9 (n05): gradient of layers.11.mlp.w2 is NaN (1 of 40 gradients)\n"
        "    replay: the same step computed again is not finite either: data; "
        "samples 3136-3167; dataset[17], [4711] of epoch 0\n"
        "    3 updates skipped · rolled back to step 90 (good) without a restart\n"
        "    learning rate x1 → x0.5, back by step 290 · samples 3136-3231 skipped (96 samples)\n"
        "    11 steps repeated, 1 min 50 s · 15 rank-minutes lost\n"
        "  non_finite       09:18:55   steps 99-101   "
        "all ranks: 3 steps in a row had a non-finite gradient   (certain)\n"
        "    3 updates skipped · rolled back to step 90 (good) without a restart\n"
        "    learning rate x0.527 → x0.25, back by step 301 · "
        "samples 3136-3519 skipped (384 samples, before: 3136-3231)\n"
        "    11 steps repeated, 1 min 50 s · 15 rank-minutes lost\n"
        "  running   step 102, last heard from just now   "
        "2 checkpoints, the last at step 95, 0.3 s each\n"
        "\n"
        "What it cost: 29 rank-minutes lost (22 steps repeated).\n"
        "Changes that affect your results:\n"
        "  learning rate lowered for 12 steps so far (x0.25 from step 90 on, back by step 301)\n"
        "  384 samples skipped (3136-3519)\n"
        "  nothing else\n"
        "Next: nothing to do; to watch it: slurm-forge status tiny-gpt --follow.\n"
        "Next time:\n"
        "  look at the samples that were skipped, among them dataset[17], [4711] of epoch 0\n"
        "  save more often (checkpoint.every_minutes): 22 steps had to be repeated\n"
        "Details: slurm-forge explain tiny-gpt --attempt 1\n"
    )


def test_the_learning_rate_is_counted_in_the_steps_that_stayed(scribe: Scribe) -> None:
    poisoned(scribe)
    scribe.train(103, 400, seconds=1)
    scribe.finish(400)
    assert (
        "results:\n"
        "  learning rate lowered for 211 steps (x0.25 from step 90 on, back by step 301)\n"
        "  384 samples skipped (3136-3519)\n"
        "  nothing else\n"
    ) in told(scribe.facts())


def test_status_says_it_while_it_lasts_and_nothing_afterwards(scribe: Scribe) -> None:
    trained(scribe)
    assert changed(scribe.facts(total=None)) is None
    scribe.later(300)
    poisoned_again = Scribe(scribe.run.path.parent, name="other")
    poisoned(poisoned_again)
    assert changed(poisoned_again.facts(total=None)) == (
        "rolled back to step 90, learning rate x0.293, back by step 301, 384 samples skipped"
    )
    poisoned_again.train(103, 301, seconds=1)
    assert changed(poisoned_again.facts(total=None)) is None


def test_a_rollback_that_changed_nothing_is_told_until_training_is_past_it(scribe: Scribe) -> None:
    trained(scribe)
    scribe.skip(99, count=3)
    scribe.unstable(101, Action.ROLLBACK, onset=99, repeats=False, target=90)
    scribe.again(90)
    scribe.train(91, 101)
    assert changed(scribe.facts()) == "rolled back to step 90"
    scribe.train(102, 102)
    assert changed(scribe.facts()) is None


def test_the_end_of_a_ladder(scribe: Scribe) -> None:
    poisoned(scribe)
    scribe.skip(103, count=3, first=3552, seconds=10)
    scribe.unstable(
        105,
        Action.HOLD,
        onset=103,
        evidence=(IN_A_ROW,),
        reason="non_finite: nothing left to try (rollback used 2 times); next: look at the loss",
        plan=RecoveryPlan(
            lr_factor=0.25, lr_from_step=90, lr_ramp_steps=211, skipped=(SampleWindow(3136, 3520),)
        ),
        rung=None,
    )
    scribe.write("supervisor", ev.LaunchEnded(outcome="non_finite", step=105, exact=True))
    scribe.end("hold")
    text = told(scribe.facts(total=20_000))
    assert text.startswith("tiny-gpt   held   step 105 of 20000   1 attempt, 1 launch   ")
    assert "\n   held: non_finite: nothing left to try (rollback used 2 times)\n\n" in text
    assert text.endswith(
        "  non_finite       09:21:25   steps 103-105   "
        "all ranks: 3 steps in a row had a non-finite gradient   (certain)\n"
        "    3 updates skipped · held: nothing left to try (rollback used 2 times) · "
        "10 steps not saved\n"
        "\n"
        "What it cost: 29 rank-minutes lost (22 steps repeated).\n"
        "Changes that affect your results:\n"
        "  learning rate lowered for 15 steps (x0.25 from step 90 on, back by step 301)\n"
        "  384 samples skipped (3136-3519)\n"
        "  3 updates skipped (step 103-105: 96 samples without effect; "
        "6 more skips undone by a rollback)\n"
        "  nothing else\n"
        "Next: look at the loss, then slurm-forge requeue tiny-gpt.\n"
        "Next time:\n"
        "  look at the samples that were skipped, among them dataset[17], [4711] of epoch 0\n"
        "  save more often (checkpoint.every_minutes): 22 steps had to be repeated\n"
        "Details: slurm-forge explain tiny-gpt --attempt 1\n"
    )


def test_a_loss_that_jumps(scribe: Scribe) -> None:
    trained(scribe, 104)
    seen = Evidence("all ranks", "the loss is 253.2, 235.6, 253.6 in 3 of the last 3 steps")
    scribe.unstable(
        106,  # two steps further than the last line of progress
        Action.ROLLBACK,
        cause=Cause.LOSS_SPIKE,
        onset=102,
        evidence=(seen,),
        changes=(HALVED,),
        plan=RecoveryPlan(lr_factor=0.5, lr_from_step=90),
        target=90,
    )
    scribe.again(90)
    text = told(scribe.facts())
    assert (
        "  loss_spike       09:17:34   steps 102-106   "
        "all ranks: the loss is 253.2, 235.6, 253.6 in 3 of the last 3 steps   (certain)\n"
        "    rolled back to step 90 (good) without a restart · learning rate x1 → x0.5 · "
        "16 steps repeated, 2 min 20 s\n"
    ) in text
    assert "for 0 steps so far (x0.5 from step 90 on, permanently); nothing else.\n" in text
    scribe.train(91, 120)
    assert (
        "Changes that affect your results: learning rate lowered for 30 steps so far "
        "(x0.5 from step 90 on, permanently); nothing else.\n"
    ) in told(scribe.facts())
    assert changed(scribe.facts()) == "rolled back to step 90, learning rate x0.5 from now on"


def test_out_of_memory_cured_in_the_process(scribe: Scribe) -> None:
    scribe.begin("n01")
    scribe.resume(0)
    scribe.train(1, 5)
    for old, new in ((32, 16), (16, 8)):
        scribe.later(2).unstable(
            5,
            Action.SHRINK_MICRO_BATCH,
            cause=Cause.CUDA_OOM,
            evidence=(OOM,),
            micro_batch=old,
            changes=(Change("micro_batch", str(old), str(new)),),
            plan=RecoveryPlan(micro_batch=new),
            rung=0,
        )
    scribe.train(6, 10)
    assert changed(scribe.facts()) == "micro-batch 8 (same global batch)"
    scribe.train(11, 400, seconds=1)
    scribe.finish(400)
    facts = replace(scribe.facts(), global_batch=512)
    assert told(facts).partition("load 3.1 s)\n")[2] == (
        "  cuda_oom         09:01:06   rank 0 on n01: CUDA out of memory. "
        "Tried to allocate 20.00 GiB   (certain)\n"
        "    micro-batch 32 → 16, same global batch · continued without a restart\n"
        "  cuda_oom         09:01:08   rank 0 on n01: CUDA out of memory. "
        "Tried to allocate 20.00 GiB   (certain)\n"
        "    micro-batch 16 → 8, same global batch · continued without a restart\n"
        "  finished at step 400   09:08:28\n"
        "\n"
        "Changes that affect your results: none.\n"
        "Other changes: micro-batch 32 → 8 with more accumulation, "
        "global batch 512 throughout.\n"
        "Next time: write micro_batch_size=8 in the program (memory ran out 2 times).\n"
        "Details: slurm-forge explain tiny-gpt --attempt 1\n"
    )


def test_out_of_memory_cured_by_another_launch(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.save(20)
    scribe.train(21, 25)
    scribe.incident(
        Cause.CUDA_OOM,
        Action.SHRINK_MICRO_BATCH,
        text=OOM.text,
        step=25,
        changes=(Change("micro_batch", "4", "2"),),
        plan=RecoveryPlan(micro_batch=2),
    )
    scribe.relaunch()
    scribe.resume(20)
    scribe.train(21, 400, seconds=1)
    scribe.finish(400)
    assert told(scribe.facts()).partition("load 3.1 s)\n")[2] == (
        "  cuda_oom         09:04:24   rank 0 on n01: CUDA out of memory. "
        "Tried to allocate 20.00 GiB   (likely)\n"
        "    micro-batch 4 → 2, same global batch · relaunched in the allocation · "
        "5 steps repeated, 50 s\n"
        "    8.5 rank-minutes lost\n"
        "  launch 2   8 ranks   from step 20 (step-00000020.a1.l1-00000000), training after 14 s "
        "(interpreter 8.0 s, rendezvous 2.1 s, load 3.1 s)\n"
        "  finished at step 400   09:10:58\n"
        "\n"
        "What it cost: 8.5 rank-minutes lost (5 steps repeated, 1 restart).\n"
        "Changes that affect your results: none.\n"
        "Other changes: micro-batch 4 → 2 with more accumulation, "
        "the same global batch throughout.\n"
        "Next time: write micro_batch_size=2 in the program.\n"
        "Details: slurm-forge explain tiny-gpt --attempt 1\n"
    )


def test_a_smaller_micro_batch_that_did_not_help_is_no_advice(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    changes = (Change("micro_batch", "2", "1"),)
    scribe.incident(Cause.CUDA_OOM, Action.SHRINK_MICRO_BATCH, changes=changes)
    scribe.relaunch()
    scribe.resume(0)
    scribe.incident(Cause.CUDA_OOM, Action.HOLD, rung=None, reason="cuda_oom: nothing left to try")
    scribe.end("hold")
    text = told(scribe.facts())
    assert "Next: use smaller models or sequences, activation checkpointing, or more GPUs" in text
    assert "micro_batch_size" not in text


def test_killed_for_memory_and_given_more(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.save(20)
    scribe.incident(
        Cause.HOST_OOM,
        Action.RAISE_MEM,
        source="slurm",
        text="slurmstepd: error: Detected 1 oom_kill event in StepId=8812301.0",
        step=20,
        changes=(Change("mem_factor", "1", "1.5"),),
        plan=RecoveryPlan(mem_factor=1.5),
    )
    scribe.requeued()
    assert changed(scribe.facts()) == "memory request x1.5"
    scribe.later(60).begin()
    scribe.resume(20)
    scribe.train(21, 400, seconds=1)
    scribe.finish(400)
    facts = replace(scribe.facts(), memory=16 << 30)
    assert told(facts).partition("load 3.1 s)\n")[2] == (
        "  host_oom         09:03:34   slurm: slurmstepd: error: Detected 1 oom_kill event in "
        "StepId=8812301.0   (likely)\n"
        "    memory 16G → 24G per node · requeued · 0 steps lost · 1.9 rank-minutes lost\n"
        "\n"
        "attempt 2   job 8812301   n[01-02]   Tue 11 Aug 09:04 → 09:11   "
        "waited 60 s in the queue\n"
        "  launch 1   8 ranks   from step 20 (step-00000020.a1.l1-00000000), training after 14 s "
        "(interpreter 8.0 s, rendezvous 2.1 s, load 3.1 s)\n"
        "  finished at step 400   09:11:09\n"
        "\n"
        "What it cost: 1.9 rank-minutes lost (1 restart), 8.0 rank-seconds idle, "
        "60 s waiting in the queue.\n"
        "Changes that affect your results: none.\n"
        "Other changes: memory request x1.5.\n"
        "Next time: request what it needed from the start: resources.mem: 24G.\n"
        "Details: slurm-forge explain tiny-gpt --attempt 1\n"
    )
    text = told(scribe.facts())
    assert "    memory request x1 → x1.5 · requeued · 0 steps lost · 1.9 rank-" in text
    assert "Next time: request 1.5 times the memory from the start (resources.mem).\n" in text


def test_fewer_workers_and_new_random_numbers(scribe: Scribe) -> None:
    trained(scribe)
    scribe.unstable(
        98,
        Action.ROLLBACK,
        onset=98,
        changes=(Change("reseeded", "0", "1"), Change("worker_factor", "1", "0.5")),
        plan=RecoveryPlan(reseeded=1, worker_factor=0.5),
        target=90,
    )
    scribe.again(90)
    scribe.train(91, 99)
    text = told(scribe.facts())
    assert "· random numbers re-seeded · data-loader workers x1 → x0.5\n    8 steps" in text
    assert "results: random numbers (dropout, …) re-seeded from step 90 on; nothing else.\n" in text
    assert "Other changes: data-loader workers x0.5.\n" in text
    assert changed(scribe.facts()) == "data-loader workers x0.5"


def test_skipped_steps_without_an_incident_say_what_was_found(scribe: Scribe) -> None:
    trained(scribe)
    scribe.skip(99, evidence=(WHERE, TRANSIENT))
    scribe.train(100, 110)
    text = told(scribe.facts())
    assert (
        "  09:16:34  1 update skipped (step 99, samples 3136-3167): "
        "rank 9 (n05): gradient of layers.11.mlp.w2 is NaN (1 of 40 gradients)\n"
        "    replay: the same step computed again is finite: transient; suspect n05\n"
    ) in text
    assert "1 update skipped (step 99: 32 samples without effect); nothing else.\n" in text


def test_a_node_that_errs_twice_is_suspect(scribe: Scribe) -> None:
    trained(scribe)
    scribe.skip(99, evidence=(WHERE, TRANSIENT))
    scribe.train(100, 110)
    assert "suspect node" not in told(scribe.facts())
    scribe.skip(111, count=3, evidence=(WHERE, TRANSIENT))
    scribe.unstable(113, Action.ROLLBACK, onset=111, repeats=False, hosts=("n05",), target=90)
    assert (
        "suspect node n05: 2 faults there that did not reproduce; report it to the "
        "cluster's support and exclude it (resources.exclude: n05)"
    ) in told(scribe.facts())
    # No node is to blame for faults that somebody asked for.
    scribe.write("rank0", ev.Note(text="injected faults: nan@111"))
    assert "suspect node" not in told(scribe.facts())


def test_a_storm_is_a_few_lines(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    for step in range(1, 601, 2):
        scribe.skip(step)
        if step % 3 == 0:
            scribe.unstable(step, Action.SKIP, onset=step, reason="non_finite: on_instability: ok")
        scribe.train(step + 1, step + 1, seconds=1)
    text = told(scribe.facts(total=None))
    assert len(text.splitlines()) < 40
    assert "195 more updates skipped in 195 rows, between steps 17 and 599\n" in text
    assert "92 more incidents from 09:00:27 on: non_finite\n" in text
    assert "1 update skipped · the program's hook: ok · continued\n" in text
    assert "300 updates skipped (step 1, 3, 5, 7, 9, …: 9600 samples without effect)" in text
    following = [happening(record) for record in scribe.facts().records]
    assert sum("skipped" in (line or "") for line in following) == 300


def test_a_long_row_is_told_ever_more_rarely_while_somebody_watches(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.skip(1, count=2500, evidence=(WHERE,))
    lines = [line for record in scribe.facts().records if (line := happening(record))]
    assert [line[10:] for line in lines if "skipped" in line] == [
        "skipped the update of step 1 (samples 0-31): "
        "rank 9 (n05): gradient of layers.11.mlp.w2 is NaN (1 of 40 gradients)",
        "10 steps in a row skipped",
        "100 steps in a row skipped",
        "1000 steps in a row skipped",
    ]


def test_a_checkpoint_that_could_not_be_used_is_told(scribe: Scribe) -> None:
    trained(scribe)
    scribe.unstable(98, Action.ROLLBACK, onset=98, target=90)
    name = "step-00000090.a1.l1-00000000"
    scribe.write("rank0", ev.CheckpointRejected(name=name, reason="block 3 is damaged"))
    passed_over(scribe, 95)
    scribe.again(0)
    text = told(scribe.facts())
    assert f"did not resume from {name}: block 3 is damaged\n" in text
    assert "step-00000095" not in text, "younger than what was gone back to: meant to be left"
    assert "rolled back to the start (that of step 90 could not be used) without" in text
    assert "step-00000095" in told(scribe.facts(), attempt=1)


def test_a_rollback_by_another_launch(scribe: Scribe) -> None:
    trained(scribe)
    scribe.unstable(98, Action.ROLLBACK, onset=98, target=90)
    assert "to be rolled back to step 90 (good)" in told(scribe.facts())
    scribe.write("supervisor", ev.LaunchEnded(outcome="non_finite", step=98, exact=True))
    scribe.relaunch()
    scribe.resume(90)
    text = told(scribe.facts())
    assert (
        "    rolled back to step 90 (good) · relaunched in the allocation · "
        "8 steps repeated, 80 s · 13 rank-minutes lost\n"
    ) in text
    assert "without a restart" not in text


def test_what_a_launch_that_never_trained_cost_is_not_what_the_one_before_did(
    scribe: Scribe,
) -> None:
    trained(scribe)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, step=98)
    scribe.relaunch()
    scribe.incident(Cause.CRASH, Action.RELAUNCH)
    scribe.relaunch()
    scribe.resume(90)
    launches = explain(scribe.facts()).attempts[0].launches
    assert [i.repeated_steps for launch in launches for i in launch.incidents] == [8, 0]


def test_a_run_that_was_cured_in_the_process_and_then_stopped_is_in_no_trouble(
    scribe: Scribe,
) -> None:
    poisoned(scribe)
    scribe.incident(
        Cause.STOP_REQUESTED,
        Action.STOP,
        source="STOP",
        text="the file exists",
        rung=None,
        reason="a stop was requested",
        confidence=Confidence.CERTAIN,
        plan=RecoveryPlan(),
    )
    scribe.end("stop")
    text = told(scribe.facts())
    assert "\n   stopped: a stop was requested\n" in text
    assert "before that" not in text


def test_nearly_full_memory_is_a_lesson(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.write("rank0", ev.Note(text="allocator retries: memory is nearly full (3 more)"))
    assert "Next time: try a smaller micro_batch_size: GPU memory was nearly full" in told(
        scribe.facts()
    )


def test_json_has_the_same_facts(scribe: Scribe) -> None:
    poisoned(scribe)
    facts = scribe.facts(total=20_000)
    launch = json.loads(to_json(explain(facts)))["attempts"][0]["launches"][0]
    first, second = launch["incidents"]
    assert (first["onset"], first["step"], first["repeats"]) == (99, 101, True)
    assert (first["repeated_steps"], first["resumed_step"]) == (11, 90)
    decision = second["decision"]
    assert (decision["target_step"], decision["target_trust"]) == (90, "good")
    assert decision["in_process"] is True
    assert decision["plan"]["lr_back_step"] == 301
    assert decision["plan"]["skipped"] == [{"first": 3136, "last": 3519}]
    assert launch["skipped"][0]["evidence"][0] == {"source": WHERE.source, "text": WHERE.text}
    assert [resume["after"] for resume in launch["resumes"]] == [None, first["id"], second["id"]]
    plan = json.loads(to_json(take_status(facts)))["plan"]
    assert (plan["rolled_back_to"], plan["lr_back_step"]) == (90, 301)


def test_somebody_who_watches_sees_what_it_cost(scribe: Scribe) -> None:
    poisoned(scribe)
    lines = [line for record in scribe.facts().records if (line := happening(record))]
    assert any(line.endswith("recovered after 2 min: 11 steps repeated") for line in lines)
    assert any("decided: non_finite: rollback, learning rate x1 → x0.5" in line for line in lines)


def test_a_lowered_learning_rate_is_told_once_over_interruptions(scribe: Scribe) -> None:
    trained(scribe)
    plan = RecoveryPlan(lr_factor=0.25, lr_from_step=90, lr_ramp_steps=60)
    scribe.unstable(98, Action.ROLLBACK, onset=98, plan=plan, changes=(HALVED,), target=90)
    scribe.again(90)
    scribe.train(91, 120)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, step=120, plan=plan)
    scribe.relaunch()
    scribe.resume(110)
    scribe.train(111, 200)
    scribe.incident(Cause.CRASH, Action.RELAUNCH, step=200, plan=plan)
    scribe.relaunch()
    scribe.resume(190)
    text = told(scribe.facts())
    assert "lowered for 60 steps (x0.25 from step 90 on, back by step 150); nothing else." in text
    assert text.count("lowered") == 1


def test_only_what_is_newly_left_out_is_told_with_an_incident(scribe: Scribe) -> None:
    trained(scribe)
    windows = (SampleWindow(100, 200), SampleWindow(500, 550))
    scribe.unstable(
        98,
        Action.ROLLBACK,
        onset=98,
        changes=(Change("skipped_samples", "100-199", "100-199, 500-549"),),
        plan=RecoveryPlan(skipped=windows),
        target=90,
    )
    scribe.again(90)
    text = told(scribe.facts())
    assert "· samples 500-549 skipped (50 samples)" in text
    assert "results: 150 samples skipped (100-199 and 500-549); nothing else." in text


def test_the_time_until_a_hang_was_noticed_is_no_training(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.later(600).incident(Cause.HANG, Action.RELAUNCH, step=22)
    story = explain(scribe.facts())
    # Two steps more than it has said, at its usual pace; not the ten minutes after them.
    assert story.training_s == pytest.approx(220)
    assert story.step == 22
