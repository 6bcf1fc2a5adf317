"""The keys that programs rely on.  A test that fails here is a broken promise to them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from slurm_forge.journal import events as ev
from slurm_forge.report.encoding import to_json
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.status.status import take_status
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Change
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.unit.report.journals import Scribe

STATUS = (
    "schema run path status words job attempt launch world_size nodes step total_steps last_seen "
    "last_seen_age_s checkpoint plan open next warnings logged jobs waiting "
    "program slow failing_saves code revised"
)
RUN = (
    "schema run path status words reason job step total_steps committed_step started last_seen "
    "elapsed_s training_s kept_s repeated_s repeated_steps goodput startup_s ending_s attempts "
    "acts changes next next_time warnings memory jobs waited_s queued_s rest_s lost_rank_s "
    "idle_rank_s starts gpus_per_rank nodes_asked waiting failing_saves "
    "repeated_at_least may_be_further spans"
)
ATTEMPT = (
    "number job via host nodes waited_s started ended last_seen outcome launches comebacks notes "
    "logs held struck found_out code"
)
LAUNCH = (
    "number started ended last_seen outcome world_size nodes start step resumes training_s "
    "repeated_steps repeated_s notices stop_step agreed_s stop_checkpoint notice_to_saved_s "
    "incidents checkpoints failed_saves rejected skipped probes slowest_probe_s late_probes "
    "program slow trends bandwidth probe_off"
)
INCIDENT = (
    "id time cause confidence step rank hosts evidence decision onset samples repeats micro_batch "
    "resumed_step repeated_steps lost_s recovered ranks repeated_s startup_s idle_s lost_rank_s "
    "idle_rank_s struck found_out repeated_at_least"
)
DECISION = "time action reason rung changes target target_step target_trust in_process plan wait_s"
RESUME = "time step checkpoint world_size exact start_s interpreter_s rendezvous_s load_s after"
PLAN = (
    "lr_scale lr_factor lr_from_step lr_ramp_steps micro_batch mem_factor exclude_nodes "
    "lr_back_step skipped reseeded worker_factor rolled_back_to time_factor nodes variables"
)


def a_run(folder: Path) -> Scribe:
    scribe = Scribe(folder)
    scribe.submitted()
    scribe.later(5).begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.write("rank0", ev.Logged(step=20, values={"loss": 2.5}))
    scribe.save(20)
    scribe.skip(21)
    changes = (Change("micro_batch", "8", "4"),)
    plan = RecoveryPlan(micro_batch=4)
    scribe.incident(Cause.CUDA_OOM, Action.RELAUNCH, changes=changes, plan=plan)
    scribe.relaunch()
    scribe.resume(20)
    return scribe


def test_the_keys_of_status(tmp_path: Path) -> None:
    body = json.loads(to_json(take_status(a_run(tmp_path).facts())))
    assert " ".join(body) == STATUS
    (logged,) = body["logged"]
    assert {"name": "loss", "value": 2.5, "step": 20}.items() <= logged.items()
    assert list(logged) == ["name", "value", "step", "time"]
    assert list(body["checkpoint"]) == [
        "name", "step", "time", "age_s", "trust", "why", "good_step"
    ]  # fmt: skip
    assert " ".join(body["plan"]) == PLAN


def test_the_keys_of_explain(tmp_path: Path) -> None:
    body = json.loads(to_json(explain(a_run(tmp_path).facts())))
    assert " ".join(body) == RUN
    assert " ".join(body["attempts"][0]) == ATTEMPT
    launch = body["attempts"][0]["launches"][0]
    assert " ".join(launch) == LAUNCH
    assert " ".join(launch["incidents"][0]) == INCIDENT
    assert " ".join(launch["resumes"][0]) == RESUME
    decision = launch["incidents"][0]["decision"]
    assert " ".join(decision) == DECISION
    assert " ".join(decision["plan"]) == PLAN
    assert launch["incidents"][0]["decision"]["changes"] == [
        {"parameter": "micro_batch", "old": "8", "new": "4"}
    ]
    assert launch["skipped"] == [
        {
            "first_step": 21,
            "last_step": 21,
            "first_sample": 640,
            "last_sample": 671,
            "undone": True,
            "time": launch["skipped"][0]["time"],
            "evidence": [],
        }
    ]
    assert list(body["changes"][0]) == ["parameter", "text", "science"]


@dataclass(frozen=True)
class Odd:
    worst: float
    text: str


def test_what_json_lacks_is_null_and_control_characters_are_escaped() -> None:
    text = to_json(Odd(math.nan, "a\x1b[2J"))
    assert json.loads(text) == {"schema": 1, "worst": None, "text": "a\x1b[2J"}
    assert "\x1b" not in text
