"""``policy test``: what would be done, told before anything happens."""

from __future__ import annotations

import json

import pytest

from tests.unit.cli.conftest import JOB, Shell
from tests.unit.cli.test_start import HEAVY, imported

NAN = ("policy", "test", "train.yaml", "--cause", "non_finite", "--at", "1200")


def told(shell: Shell, *words: str, job: str = JOB) -> str:
    (shell.folder / "train.yaml").write_text(job)
    result = shell("policy", "test", "train.yaml", *words)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_three_instabilities_at_the_same_place_are_told_step_by_step(shell: Shell) -> None:
    result = shell(*NAN, "--repeat", "3")
    assert result.exit_code == 0
    assert result.stdout == (
        "tiny-gpt: non_finite at step 1200, 3 times\n"
        "assumed: a checkpoint every 100 steps (--every-steps), good 20 steps later, 3 kept; "
        "512 samples a step (--global-batch)\n"
        "ladder:  skip (up to 3 in a row) -> rollback (3 times, learning rate x 0.5 ramped over "
        "200 steps, bad samples skipped) -> hold\n"
        "\n"
        "1. step 1202, 3 updates in a row skipped (1200-1202)\n"
        "   rollback to step 1100   rung 2 of 2, 2 left\n"
        "     lr_scale  1 → 0.5, back by step 1300\n"
        "     skipped_samples  - → 613888-615423\n"
        "     non_finite: rollback (to step 1100)\n"
        "\n"
        "2. step 1202, 3 updates in a row skipped (1200-1202)\n"
        "   rollback to step 1000   rung 2 of 2, 1 left\n"
        "     skipped_samples  613888-615423 → 613888-620031\n"
        "     non_finite: rollback (to step 1000, further back than last time)\n"
        "\n"
        "3. step 1202, 3 updates in a row skipped (1200-1202)\n"
        "   rollback to step 900   rung 2 of 2, none left\n"
        "     skipped_samples  613888-620031 → 613888-638463\n"
        "     non_finite: rollback (to step 900, further back than last time)\n"
        "\n"
        "then: hold\n"
        "     non_finite: nothing left to try (rollback used 3 times); next: look at the loss, the "
        "data and the learning rate around that step; to resume from an earlier "
        "checkpoint: slurm-forge checkpoints --help\n"
    )


def test_what_follows_the_incidents_asked_for_is_told_too(shell: Shell) -> None:
    text = told(shell, "--cause", "hang")
    assert "   relaunch   rung 1 of 2, 1 left\n" in text
    assert "\nthen: relaunch 1 more time\nthen: requeue 3 more times\nthen: hold\n" in text


def test_an_end_before_the_last_incident_asked_for_is_the_end(shell: Shell) -> None:
    text = told(shell, "--cause", "app_error", "--repeat", "5")
    assert "2. step 1000\n   hold\n" in text
    assert "the same error at the same step twice in a row; next: fix the error" in text
    assert "3. step" not in text
    assert "then:" not in text


def test_what_has_no_limit_says_so(shell: Shell) -> None:
    text = told(shell, "--cause", "preempted", "--repeat", "2", "--at", "300")
    assert "ladder:  requeue (without limit)\n" in text
    assert "1. step 300\n" in text
    assert "2. step 400\n" in text, "what was trained until then was saved"
    assert text.endswith("\nthen: requeue again, without limit\n")


def test_where_the_checkpoints_lie_is_the_jobs_word_or_the_commands(shell: Shell) -> None:
    job = f"{JOB}checkpoint: {{every_steps: 250, good_after_steps: 10}}\n"
    one = ("--cause", "loss_spike", "--at", "1200")
    assert "rollback to step 1000 " in told(shell, *one, job=job)
    assert "rollback to step 1160 " in told(shell, *one, "--every-steps", "40", job=job)
    assert "rollback to the start " in told(shell, *one, "--every-steps", "1200", job=job)


def test_a_checkpoint_that_is_not_good_yet_is_passed_over(shell: Shell) -> None:
    assert "rollback to step 1100 " in told(shell, "--cause", "non_finite", "--at", "1210")
    assert "rollback to step 1200 " in told(shell, "--cause", "non_finite", "--at", "1221")


def test_the_jobs_own_ladder_is_what_is_tried(shell: Shell) -> None:
    job = (
        f"{JOB}recovery:\n  loss_spike:\n  - {{do: warn, times: 1}}\n  - {{do: hook, times: 1}}\n"
        "  - {do: rollback, times: 1, depth: 1, reseed: true}\n"
    )
    text = told(shell, "--cause", "loss_spike", "--repeat", "2", "--at", "1000", job=job)
    assert "the program's hook does not answer" in text
    assert (
        "ladder:  warn (once) -> hook (once) -> rollback (once, 1 further back, reseeded)" in text
    )
    assert "1. step 1000\n   warn   rung 1 of 3, none left\n" in text
    assert "2. step 1001\n   rollback to step 800   rung 3 of 3, none left\n" in text
    assert "     reseeded  0 → 1\n" in text


def test_memory_that_the_job_does_not_name_is_not_raised(shell: Shell) -> None:
    assert "   fewer_workers   rung 2 of 3" in told(shell, "--cause", "host_oom")
    job = JOB.replace("{partition: long", "{mem: 4G, partition: long")
    assert "     mem_factor  1 → 1.5\n" in told(shell, "--cause", "host_oom", job=job)


def test_a_coupled_batch_is_not_shrunk(shell: Shell) -> None:
    assert "micro_batch  8 → 4" in told(shell, "--cause", "cuda_oom")
    text = told(shell, "--cause", "cuda_oom", job=f"{JOB}batch_coupled: true\n")
    assert "batch_coupled" in text
    assert "1. step 1000\n   hold\n" in text


def test_what_somebody_wanted_is_a_stop(shell: Shell) -> None:
    text = told(shell, "--cause", "user_cancelled")
    assert text.endswith("1. step 1000\n   stop\n     the job was cancelled; it stays cancelled\n")


def test_for_programs(shell: Shell) -> None:
    result = shell(*NAN, "--repeat", "2", "--global-batch", "32", "--json")
    body = json.loads(result.stdout)
    assert (body["schema"], body["run"], body["cause"], body["at"]) == (
        1,
        "tiny-gpt",
        "non_finite",
        1200,
    )
    first, second = body["incidents"]
    assert (first["action"], first["rung"], first["left"], first["target_step"]) == (
        "rollback",
        1,
        2,
        1100,
    )
    assert {"parameter": "skipped_samples", "old": "-", "new": "38368-38463"} in first["changes"]
    assert second["target_step"] == 1000
    assert body["then"] == [{"action": "rollback", "times": 1}]
    assert body["end"] == "hold"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cause", "non_finit"), 'unknown cause "non_finit" (did you mean "non_finite"?)'),
        (("--cause", "nan"), 'unknown cause "nan" (did you mean "non_finite"?)'),
        (("--cause", "zzz"), 'unknown cause "zzz" (known here: preempted, '),
        (("--cause", "hang", "--repeat", "0"), "--repeat"),
        (("--cause", "hang", "--at", "-1"), "--at"),
        ((), "--cause"),
    ],
)
def test_what_can_not_be_understood(shell: Shell, words: tuple[str, ...], message: str) -> None:
    result = shell("policy", "test", "train.yaml", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_a_mistake_in_the_job_file_names_file_line_and_nearest_key(shell: Shell) -> None:
    job = f"{JOB}recovery:\n  hang:\n  - {{do: relaunch, time: 3}}\n"
    (shell.folder / "train.yaml").write_text(job)
    result = shell("policy", "test", "train.yaml", "--cause", "hang")
    assert result.exit_code == 2
    assert result.stderr == (
        'train.yaml:7: recovery.hang[0].time: unknown key (did you mean "times"?)\n'
    )
    result = shell("policy", "test", "elsewhere.yaml", "--cause", "hang")
    assert result.exit_code == 2
    assert "elsewhere.yaml: can't be read" in result.stderr


def test_help_has_an_example(shell: Shell) -> None:
    said = " ".join(shell("policy", "test", "--help").stdout.split())
    assert "Examples: slurm-forge policy test " in said
    assert "policy" in shell("--help").stdout


def test_nothing_heavy_is_imported_for_it(shell: Shell) -> None:
    found = imported("policy", "test", "train.yaml", "--cause", "non_finite")
    assert "slurm_forge" in found
    assert not found & HEAVY
