"""What somebody is told about their job before it is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_forge.report.outlook import outlook
from slurm_forge.site.model import Site
from slurm_forge.spec import job_from_mapping


def told(site: dict[str, Any], resources: dict[str, Any] | None = None, **job: Any) -> str:
    spec = job_from_mapping({"name": "tiny", "entry": "a.b:f", "resources": resources or {}, **job})
    return "\n".join(outlook(spec, Site.model_validate({"name": "hill", **site})))


def test_a_partition_that_cancels() -> None:
    site = {"partitions": {"long": {"preemption": {"mode": "CANCEL", "grace": "120s"}}}}
    assert told(site, {"partition": "long"}).startswith(
        "hill, partition long: preempted jobs are cancelled after 120 s of notice and not "
        "requeued; a successor job will be submitted (afterany)."
    )


@pytest.mark.parametrize(
    ("preemption", "words"),
    [
        ({"mode": "OFF"}, "jobs are not preempted."),
        ({"mode": "REQUEUE", "grace": "60s"}, "are requeued after 60 s of notice; the run goes on"),
        ({"mode": "REQUEUE"}, "are requeued after a notice of unknown length;"),
        (
            {"mode": "REQUEUE", "grace": "0s"},
            "requeued without notice (only what was saved stays: checkpoint every 10 min (later as "
            "often as it pays))",
        ),
        ({"mode": "SUSPEND"}, "are suspended and go on later"),
        ({}, "nobody has said what happens to preempted jobs"),
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
        "the last save begins 120 s before the time limit of 30 min, and the run goes on beyond "
        "it in another attempt; checkpoint every 10 min (later as often as it pays) and every "
        "50 steps, the newest 2 kept."
    ) in text


def test_checkpoints_of_a_command_are_its_own() -> None:
    job = {"entry": None, "command": ["./t"], "program": {"checkpoint_glob": "out/ck-*"}}
    text = told({"preemption_default": {"mode": "REQUEUE", "grace": "0s"}}, {"time": "1h"}, **job)
    assert "without notice (only what was saved stays: checkpoints are the program's own)" in text
    assert "the program is told 120 s before the time limit of 1 h" in text
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
    assert "warning: hill wants an account (resources.account)." in text
    assert "a requeued job can start again after 121 s at the earliest." in text
    assert "wants an account" not in told({"account_required": True}, {"account": "mine"})
