"""What scontrol and sacct print becomes values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.testing.cluster.layout import SlurmVersion
from slurm_forge.testing.cluster.machine import parse_version
from slurm_forge.testing.cluster.records import parse_accounting, parse_job

LINE = (
    "JobId=2 JobName=wrap UserId=root(0) Priority=4294901758 JobState=RUNNING Reason=None"
    " Dependency=(null) Requeue=1 Restarts=3 BatchFlag=1 ExitCode=0:0 PreemptTime=None"
    " AllocNode:Sid=localhost:3199 ReqNodeList=(null) NodeList=n[1-2] BatchHost=n1 NumNodes=2"
    " CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=2,mem=3000M,node=2,billing=2"
    " Command=/a b/train.sh --lr 3 WorkDir=/tmp/cw Power="
)


def test_a_line_of_scontrol() -> None:
    job = parse_job(LINE)
    assert (job.job_id, job.state, job.nodes, job.restarts) == ("2", "RUNNING", "n[1-2]", 3)
    assert job.field("TRES") == "cpu=2,mem=3000M,node=2,billing=2"
    assert job.field("CPUs/Task") == "1"
    assert job.field("Command") == "/a b/train.sh --lr 3"
    assert job.field("PreemptTime") is None
    assert job.field("NoSuchField") is None


def test_a_pending_job_has_no_nodes() -> None:
    assert parse_job("JobId=1 JobState=PENDING NodeList=(null)").nodes == ""


def test_a_value_that_looks_like_a_field_does_not_replace_one() -> None:
    assert parse_job(f"{LINE} Comment=x JobState=FAILED").state == "RUNNING"


@given(st.text())
def test_any_other_text_is_a_value_error_at_most(text: str) -> None:
    try:
        parse_job(text)
    except ValueError:
        return
    assert "JobId=" in text


def test_lines_of_sacct() -> None:
    text = (
        "4|PREEMPTED|0:0|n[1-2]|2026-01-01T00:00:00|2026-01-01T00:01:00\n"
        "4.0|CANCELLED by 0|0:9|n1|2026-01-01T00:00:00|2026-01-01T00:01:00\n"
        "4|PENDING|0:0|None assigned|Unknown|Unknown\n"
        "slurm_load: something else\n"
    )
    assert [(r.job_id, r.state) for r in parse_accounting(text)] == [
        ("4", "PREEMPTED"),
        ("4.0", "CANCELLED"),
        ("4", "PENDING"),
    ]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("slurm-wlm 22.05.8\n", SlurmVersion(22, 5)),
        ("slurm 26.05.3-rc1", SlurmVersion(26, 5)),
    ],
)
def test_slurms_version(text: str, version: SlurmVersion) -> None:
    assert parse_version(text) == version


def test_versions_are_ordered() -> None:
    assert SlurmVersion(22, 5) < SlurmVersion(23, 2) < SlurmVersion(23, 11)
    with pytest.raises(ValueError, match="version"):
        parse_version("not found")
