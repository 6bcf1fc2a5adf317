"""What somebody is told about their job before it is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_forge.launch.render.save_times import SaveNote
from slurm_forge.recovery.policy.prediction import (
    BroughtBack,
    JobConditions,
    predict,
)
from slurm_forge.report.submission.submit_notes import outlook
from slurm_forge.site.model import Preemption, PreemptionMode, Site
from slurm_forge.spec import job_from_mapping


def told(site: dict[str, Any], resources: dict[str, Any] | None = None, **job: Any) -> str:
    spec = job_from_mapping({"name": "tiny", "entry": "a.b:f", "resources": resources or {}, **job})
    return "\n".join(outlook(spec, Site.model_validate({"name": "hill", **site})))


def test_a_partition_that_cancels() -> None:
    site = {"partitions": {"long": {"preemption": {"mode": "CANCEL", "grace": "120s"}}}}
    assert told(site, {"partition": "long"}).startswith(
        "hill, partition long: preempted jobs are cancelled after 120 s of notice; the run "
        "requeues itself, as the same job."
    )


NO_REQUEUE = {"sbatch_options": ["--no-requeue"]}
FORBIDDEN = {"self_requeue_allowed": False}


@pytest.mark.parametrize(
    ("mode", "grace", "site", "words"),
    [
        ("CANCEL", "60s", {}, "cancelled after 60 s of notice; the run requeues itself, as the"),
        ("CANCEL", "0s", {}, "kept: c); the run requeues itself, as the same job."),
        (
            "CANCEL",
            "60s",
            NO_REQUEUE,
            "of notice; a successor job is submitted (afterany): --no",
        ),
        (
            "CANCEL",
            "60s",
            FORBIDDEN,
            "the run is held until you requeue it (slurm-forge",
        ),
        ("REQUEUE", "60s", {}, "requeued after 60 s of notice; the run continues from its last"),
        (
            "REQUEUE",
            "60s",
            NO_REQUEUE,
            "cancelled after 60 s of notice; a successor job is",
        ),
        (
            "REQUEUE",
            "0s",
            NO_REQUEUE,
            "a successor job is submitted (afterany): --no-requeue",
        ),
        ("REQUEUE", "60s", FORBIDDEN, "requeued after 60 s of notice; the run is held until you"),
        # Slurm itself does it, at once.
        ("REQUEUE", "0s", FORBIDDEN, "the run continues from its last checkpoint"),
    ],
)
def test_who_brings_it_back_is_what_doctor_says_as_well(
    mode: str, grace: str, site: dict[str, Any], words: str
) -> None:
    preemption = Preemption(mode=PreemptionMode(mode), grace=grace)
    text = told({"preemption_default": {"mode": mode, "grace": grace}, **site})
    assert words in text.replace(
        "(only what was saved survives: checkpoint every 10 min (later as often as it pays))",
        "kept: c)",
    )
    back_by = predict(
        JobConditions(
            preemption=preemption,
            requeue=site is not NO_REQUEUE,
            self_requeue_allowed=site.get("self_requeue_allowed"),
        )
    ).back_by
    assert (back_by is BroughtBack.SUCCESSOR) == ("successor" in text)
    assert (back_by is BroughtBack.PERSON) == ("is held until" in text)


@pytest.mark.parametrize(
    ("preemption", "words"),
    [
        ({"mode": "OFF"}, "jobs are not preempted."),
        (
            {"mode": "REQUEUE", "grace": "60s"},
            "are requeued after 60 s of notice; the run continues",
        ),
        ({"mode": "REQUEUE"}, "are requeued after a notice of unknown length;"),
        (
            {"mode": "REQUEUE", "grace": "0s"},
            "requeued without notice (only what was saved survives: checkpoint every 10 min (later "
            "as often as it pays))",
        ),
        ({"mode": "SUSPEND"}, "are suspended and later resumed"),
        ({}, "the site file does not say what happens to preempted jobs"),
        (
            {"mode": "REQUEUE", "grace": "60s", "exempt": "2h"},
            "Not before a job has run for 2 h.",
        ),
    ],
)
def test_every_way_of_being_preempted(preemption: dict[str, str], words: str) -> None:
    assert words in told({"preemption_default": preemption})


def test_time_limit_lead_and_checkpoints() -> None:
    text = told({}, {"time": "00:30:00"}, checkpoint={"every_steps": 50, "keep_last": 2})
    assert (
        "the last save begins 120 s before the time limit of 30 min; beyond it the run continues "
        "in another attempt; checkpoint every 10 min (later as often as it pays) and every "
        "50 steps, the newest 2 kept."
    ) in text


def test_checkpoints_of_a_command_are_its_own() -> None:
    job = {"entry": None, "command": ["./t"], "program": {"checkpoint_glob": "out/ck-*"}}
    text = told({"preemption_default": {"mode": "REQUEUE", "grace": "0s"}}, {"time": "1h"}, **job)
    assert (
        "without notice (only what was saved survives: checkpoints are the program's own)" in text
    )
    assert "the program is signalled 120 s before the time limit of 1 h" in text
    assert text.endswith("checkpoints are the program's own: out/ck-*.")
    joins = told({}, entry=None, command=["./t"], checkpoint={"every_steps": 5})
    assert "every 5 steps" in joins, "its ranks join the run"


def test_what_slurm_will_refuse_is_said_before() -> None:
    facts = {"max_time": "2d", "max_nodes": 4, "self_requeue_allowed": False}
    text = told({"partitions": {"p": facts}}, {"partition": "p", "time": "72:00:00", "nodes": 8})
    assert "warning: hill, partition p allows 2 d at most and the job asks for 3 d" in text
    assert "warning: hill, partition p allows 4 nodes at most and the job asks for 8" in text
    assert "does not let jobs requeue themselves" in text


def test_each_of_several_partitions_is_told() -> None:
    site = {
        "partitions": {
            "a": {"preemption": {"mode": "OFF"}},
            "b": {"preemption": {"mode": "CANCEL"}},
        }
    }
    text = told(site, {"partition": "a,b"})
    assert "partition a: jobs are not preempted." in text
    assert "partition b: preempted jobs are cancelled" in text


def test_an_account_and_the_delay_after_a_requeue() -> None:
    text = told({"account_required": True, "requeue_delay": "121s"})
    assert "warning: hill requires an account (resources.account)." in text
    assert "a requeued job starts again after 121 s at the earliest." in text
    assert "wants an account" not in told({"account_required": True}, {"account": "mine"})


# -- how long saves take ---------------------------------------------------------------------------


def told_of_saves(seconds: float, grace: str | None = None, **job: Any) -> str:
    resources = job.pop("resources", {"time": "12:00:00"})
    spec = job_from_mapping({"name": "tiny", "entry": "a.b:f", "resources": resources, **job})
    site = {"name": "hill", "preemption_default": {"mode": "REQUEUE", "grace": grace}}
    note = SaveNote(seconds=seconds, blocked_s=0.3, job="8790112")
    lines = outlook(spec, Site.model_validate(site if grace else {"name": "hill"}), saves=note)
    return "\n".join(lines)


def test_measured_saves_and_whether_the_lead_is_enough() -> None:
    assert (
        "saves take about 7 s (measured in job 8790112): lead time 120 s is enough."
    ) in told_of_saves(7.2)
    text = told_of_saves(100.0)
    assert "the last save begins 5m10s before the time limit of 12 h" in text
    assert "saves take about 100 s (measured in job 8790112): lead time 5m10s is enough." in text


def test_a_lead_that_is_not_enough_says_what_would_be() -> None:
    assert (
        "lead time 60 s is not enough for two saves, one of which may already be running; remove "
        "lead (it would be 145 s), or increase it."
    ) in told_of_saves(45.0, lead="60s")
    short = told_of_saves(90.0, resources={"time": "00:04:00"})
    assert "lead time 120 s is not enough" in short and "request more time." in short


def test_a_notice_shorter_than_a_save_leaves_only_the_periodic_ones() -> None:
    text = told_of_saves(45.0, "20s")
    assert (
        "warning: the notice of 20 s at a preemption is shorter than a save: only "
        "periodic checkpoints survive; with one interruption a day, one about every 4 min "
        "(every_minutes: auto adapts to what it measures)."
    ) in text
    seldom = told_of_saves(45.0, "20s", checkpoint={"every_minutes": 60})
    assert "least is lost with checkpoint.every_minutes: 4, assuming one interruption" in seldom
    often = told_of_saves(45.0, "20s", checkpoint={"every_minutes": 5})
    assert "checkpoints survive, every 300 s." in often
    assert "is enough for one save, but not for two in a row." in told_of_saves(45.0, "60s")
    assert "notice of 120 s at" not in told_of_saves(45.0, "120s")
    # Without any notice at all that is told where the preemption is.
    assert "shorter than a save" not in told_of_saves(45.0, "0s")


def test_nothing_is_said_of_saves_that_nobody_has_seen() -> None:
    assert "saves take" not in told({}, {"time": "12:00:00"})


# -- an array of attempts --------------------------------------------------------------------------

CHAIN: dict[str, Any] = {"template": "array", "chain": 5}


def test_an_array_says_how_long_it_can_go_and_what_follows() -> None:
    site = {"preemption_default": {"mode": "CANCEL", "grace": "120s"}}
    text = told(site, {"time": "12:00:00"}, **CHAIN)
    assert "cancelled after 120 s of notice; the next task continues." in text
    assert (
        "an array of 5 tasks, one at a time, each an attempt of 12 h, 60 h in all: each "
        "task starts when the previous one has ended; after the last one the run is requeued."
    ) in text


def test_where_requeues_are_forbidden_an_array_is_not_warned_of_them() -> None:
    site = {"self_requeue_allowed": False}
    text = told(site, {"time": "12:00:00"}, **CHAIN)
    assert "does not let jobs requeue themselves" not in text
    assert "after the last one it is held, and slurm-forge requeue submits as many again" in text
    assert "(template: array needs no requeue)" in told(site, {"time": "12:00:00"})


def test_an_array_without_a_time_limit_promises_no_sum() -> None:
    assert "an attempt of as long as the partition allows: each" in told({}, **CHAIN)
