"""Against the recorded output of a real Slurm 22.05.8 (``data/``; only paths were replaced)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import SlurmCommandError
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import PENDING_LIKE, JobState
from slurm_forge.slurm.text.parsing import (
    parse_accounting,
    parse_config,
    parse_job_id,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_queue,
)

DATA = Path(__file__).parent / "data"
START = datetime.fromtimestamp(1795255017, timezone.utc)


def text(name: str) -> str:
    return (DATA / f"{name}.txt").read_text()


def job(name: str) -> JobRecord:
    (record,) = parse_jobs(text(name), timezone.utc)
    return record


def test_a_running_job() -> None:
    record = job("job_running")
    assert (record.job_id, record.job_ref, record.name) == (35, "35", "train")
    assert (record.state, record.reason) == (JobState.RUNNING, None)
    assert (record.requeue, record.restarts) == (True, 0)
    assert record.start_time == START
    assert record.end_time == START + timedelta(hours=1)
    assert record.time_limit == timedelta(hours=1)
    assert record.preempt_time is None
    assert (record.partition, record.nodelist) == ("preempt", "s1n[1-2]")
    assert record.num_nodes == 2
    assert (record.memory_per_node, record.memory_per_cpu) == (2 << 30, None)
    assert (record.comment, record.command, record.excluded_nodes) == ("first try", None, None)
    assert not record.held


def test_the_form_with_one_line_gives_the_same_record() -> None:
    (one_line,) = parse_jobs(text("job_running_one_line"), timezone.utc)
    several = job("job_running")
    differing = [
        field.name
        for field in fields(JobRecord)
        if getattr(one_line, field.name) != getattr(several, field.name)
    ]
    assert differing == []


def test_a_preempted_job_in_its_grace_time_is_told_from_one_at_its_limit() -> None:
    record = job("job_preempted_in_grace")
    assert record.state is JobState.RUNNING
    assert record.preempt_time is not None and record.end_time is not None
    # EndTime has moved from one hour after the start to GraceTime (10 s) after the notice.
    assert record.end_time - record.preempt_time == timedelta(seconds=10)


def test_a_requeued_job_that_still_cleans_up() -> None:
    record = job("job_requeued_completing")
    assert (record.state, record.restarts) == (JobState.COMPLETING, 1)
    # Slurm forgets the preemption here: it can be proven only during the grace time.
    assert record.preempt_time is None


def test_a_cancelled_job_that_still_cleans_up() -> None:
    record = job("job_cancelled_completing")
    assert (record.state, record.restarts) == (JobState.COMPLETING, 0)


def test_a_requeued_job_waits_with_nothing_left_of_its_nodes() -> None:
    record = job("job_pending_requeued")
    assert (record.state, record.reason, record.restarts) == (JobState.PENDING, "BeginTime", 1)
    assert record.nodelist is None
    assert record.submit_time is not None and record.eligible_time is not None
    # cred_expire=5: six seconds from the end to the earliest start.
    assert record.eligible_time - record.submit_time == timedelta(seconds=6)
    assert not record.held


@pytest.mark.parametrize("name", ["job_held", "job_requeued_and_held"])
def test_held_jobs_are_told_from_waiting_ones(name: str) -> None:
    record = job(name)
    assert record.state in PENDING_LIKE
    assert record.held


def test_a_hold_is_told_by_priority_or_by_reason_and_only_of_a_waiting_job() -> None:
    waiting = job("job_pending_requeued")
    assert replace(waiting, priority=0).held
    assert replace(waiting, reason="JobHeldAdmin").held
    assert replace(waiting, state=JobState.SPECIAL_EXIT).held
    assert not replace(job("job_running"), priority=0).held
    assert not replace(job("job_completed"), priority=0, reason="JobHeldUser").held


@pytest.mark.parametrize(
    ("name", "state", "reason", "exit_code"),
    [
        ("job_completed", JobState.COMPLETED, None, (0, 0)),
        ("job_failed", JobState.FAILED, "NonZeroExitCode", (3, 0)),
        ("job_cancelled", JobState.CANCELLED, None, (0, 9)),
    ],
)
def test_jobs_that_are_over(
    name: str, state: JobState, reason: str | None, exit_code: tuple[int, int]
) -> None:
    record = job(name)
    assert (record.state, record.reason, record.exit_code) == (state, reason, exit_code)
    assert not record.held


def test_each_array_task_has_its_own_reference() -> None:
    records = parse_jobs(text("job_array"))
    assert [record.job_ref for record in records] == ["42", "42_2", "42_1"]
    assert [record.job_id for record in records] == [42, 48, 47]
    waiting = records[0]
    assert (waiting.array_task, waiting.num_nodes) == ("3-6%2", 1)
    assert (waiting.start_time, waiting.eligible_time) == (None, None)


def test_each_component_of_a_heterogeneous_job_is_a_record() -> None:
    assert [record.job_id for record in parse_jobs(text("job_het"))] == [45, 46]


def test_free_text_is_not_taken_for_keys() -> None:
    record = job("job_odd_name")
    assert record.name == "odd name JobState=FAILED"
    assert record.state is JobState.RUNNING
    assert record.comment == "a StdOut=/x  WorkDir=y"


def test_what_a_comment_adds_after_a_line_break_changes_nothing_before_it() -> None:
    forged = "Comment=x\n   Partition=evil\n   JobState=FAILED"
    (record,) = parse_jobs(text("job_running").replace("Comment=first try", forged))
    assert (record.state, record.partition) == (JobState.RUNNING, "preempt")


def test_free_text_is_not_taken_for_keys_with_one_line_either() -> None:
    one_line = " ".join(text("job_odd_name").split())
    (record,) = parse_jobs(one_line)
    assert record.name == "odd name JobState=FAILED"
    assert record.state is JobState.RUNNING


@pytest.mark.parametrize(
    "recorded",
    [
        text("job_name_with_line_break"),
        text("job_running").replace("JobName=train", "JobName=x\n   UserId=root(0)\n   A=b"),
        text("job_running_one_line").replace("JobName=train", "JobName=a UserId=b(1) JobState=X"),
    ],
)
def test_a_name_that_looks_like_a_record_is_refused_rather_than_believed(recorded: str) -> None:
    with pytest.raises(SlurmCommandError, match="name"):
        parse_jobs(recorded)


def test_a_newer_slurm_may_add_keys_states_and_a_failed_node() -> None:
    newer = (
        text("job_running")
        .replace("   UserId=", "   SLUID=s8Q3\n   UserId=", 1)
        .replace("JobState=RUNNING Reason=None", "JobState=DREAMING Reason=New FailedNode=n7")
        .replace("   WorkDir=", "   SubmitLine=sbatch a Partition=evil\n   WorkDir=", 1)
    )
    (record,) = parse_jobs(newer)
    assert (record.state, record.state_text) == (JobState.UNKNOWN, "DREAMING")
    assert (record.failed_node, record.partition) == ("n7", "preempt")


def test_no_jobs_at_all() -> None:
    assert parse_jobs("No jobs in the system\n") == ()


def test_partitions() -> None:
    by_name = {record.name: record for record in parse_partitions(text("partitions"))}
    assert set(by_name) == {"normal", "preempt", "preempt-nograce", "cancel"}
    preempt, cancel = by_name["preempt"], by_name["cancel"]
    assert (preempt.preempt_mode, preempt.grace_time) == ("REQUEUE", timedelta(seconds=10))
    assert (cancel.preempt_mode, cancel.grace_time) == ("CANCEL", timedelta(seconds=20))
    assert by_name["preempt-nograce"].grace_time == timedelta(0)
    assert [name for name, record in by_name.items() if record.is_default] == ["normal"]
    assert (preempt.state, preempt.nodes, preempt.total_nodes) == ("UP", "s1n[1-4]", 4)
    assert (preempt.max_time, preempt.default_time) == (None, timedelta(minutes=10))
    assert (preempt.max_nodes, preempt.priority_tier, preempt.qos) == (None, 10, None)


def test_nodes() -> None:
    by_name = {record.name: record for record in parse_nodes(text("nodes"), timezone.utc)}
    assert list(by_name) == ["s3n1", "s3n2", "s3n3", "s3n4"]
    busy, dead, drained = by_name["s3n1"], by_name["s3n3"], by_name["s3n4"]
    assert busy.state == ("MIXED",)
    assert (busy.reason, busy.is_down, busy.is_drained) == (None, False, False)
    assert dead.state == ("DOWN", "NOT_RESPONDING")
    assert (dead.is_down, dead.is_drained) == (True, False)
    assert dead.reason == "Not responding"
    assert drained.state == ("IDLE", "DRAIN")
    assert (drained.is_down, drained.is_drained) == (False, True)
    # Administrators write what they like; the keys in it are none.
    assert drained.reason == "disk = bad Partitions=x  [gone]"


@pytest.mark.parametrize(
    ("state", "flags"),
    [
        ("IDLE*+DRAIN", ("IDLE", "NOT_RESPONDING", "DRAIN")),
        ("DOWN*", ("DOWN", "NOT_RESPONDING")),
        ("MIXED+DRAIN+NOT_RESPONDING", ("MIXED", "DRAIN", "NOT_RESPONDING")),
    ],
)
def test_states_of_a_node(state: str, flags: tuple[str, ...]) -> None:
    (node,) = parse_nodes(f"NodeName=n1 Arch=x86_64\n   State={state} ThreadsPerCore=1\n")
    assert node.state == flags
    assert node.is_down


def test_a_node_s_reason_without_an_author_and_nodes_that_are_not_there() -> None:
    (node,) = parse_nodes("NodeName=n1\n   State=DOWN\n   Reason=see [ticket@never]\n")
    assert node.reason == "see"
    (node,) = parse_nodes("NodeName=n1\n   State=DOWN\n   Reason=no power\n")
    assert node.reason == "no power"
    assert parse_nodes("Node n9 not found\n") == ()


def test_configuration() -> None:
    config = parse_config(text("config"))
    assert (config.cluster_name, config.version) == ("forge1", "22.05.8")
    assert config.controller_time == datetime.fromtimestamp(1795255017, timezone.utc)
    assert (config.preempt_type, config.preempt_mode) == ("preempt/partition_prio", "REQUEUE")
    assert config.kill_wait == timedelta(seconds=5)
    assert config.slurmd_timeout == timedelta(seconds=10)
    assert config.min_job_age == timedelta(minutes=10)
    assert config.job_requeue
    assert config.max_batch_requeue is None
    assert (config.preempt_parameters, config.slurmctld_parameters) == ((), ())
    assert config.auth_info[-1] == "cred_expire=5"
    assert config.requeue_delay == timedelta(seconds=6)
    assert not config.sends_user_signal
    assert config.select_type == "select/cons_tres"


@pytest.mark.parametrize(
    ("old", "new", "delay"),
    [
        ("cred_expire=5", "cred_expire=2", 121),
        (",cred_expire=5", "", 121),
        ("cred_expire=5", "cred_expire=600", 601),
        ("sched_interval=1", "requeue_delay=30", 31),
    ],
)
def test_the_delay_after_a_requeue(old: str, new: str, delay: int) -> None:
    # Slurm takes less than 5 s for a mistake and then uses its default of 120 s.
    config = parse_config(text("config").replace(old, new))
    assert config.requeue_delay == timedelta(seconds=delay)


@pytest.mark.parametrize(
    "line",
    [
        "PreemptParameters       = reclaim,send_user_signal",
        "SlurmctldParameters     = preempt_send_user_signal",
    ],
)
def test_both_spellings_of_the_user_signal(line: str) -> None:
    assert parse_config(line + "\n" + text("config")).sends_user_signal


def test_accounting_keeps_the_run_before_the_preemption() -> None:
    rows = parse_accounting(text("sacct_preempted"), timezone.utc)
    runs = [row for row in rows if row.step is None]
    assert [row.state for row in runs] == [JobState.PREEMPTED, JobState.RUNNING]
    assert (runs[0].start_time, runs[0].end_time) == (START, START + timedelta(seconds=16))
    assert runs[1].end_time is None
    assert [row.step for row in rows] == [None, "batch", "0"] * 2
    assert {row.job_id for row in rows} == {35}
    assert rows[1].exit_code == (0, 9)


def test_accounting_tells_who_cancelled() -> None:
    rows = parse_accounting(text("sacct_cancelled"))
    assert (rows[0].state, rows[0].cancelled_by) == (JobState.CANCELLED, 0)
    assert rows[1].cancelled_by is None


def test_accounting_of_an_array_names_tasks_and_their_job_ids() -> None:
    rows = [row for row in parse_accounting(text("sacct_array")) if row.step is None]
    assert [(row.job_ref, row.job_id) for row in rows] == [("42_1", 47), ("42_2", 48), ("42", 42)]


def test_the_queue() -> None:
    rows = {row.job_ref: row for row in parse_queue(text("squeue"))}
    assert rows["35"].state is JobState.RUNNING
    assert rows["42_[3-6%2]"].start_time is None
    assert rows["41"].reason == "job_requeued_in_held_state"
    assert rows["42_1"].job_id == 47


@pytest.mark.parametrize(
    ("answer", "job_id"),
    [("17\n", "17"), ("17;cluster\n", "17"), ("Welcome, the quota is fine\n\n18\n", "18")],
)
def test_the_new_jobs_id(answer: str, job_id: str) -> None:
    assert parse_job_id(answer) == job_id


PARSERS: list[Callable[[str], Any]] = [
    parse_jobs,
    parse_partitions,
    parse_nodes,
    parse_config,
    parse_accounting,
    parse_queue,
    parse_job_id,
]
RECORDED = sorted(path.stem for path in DATA.glob("*.txt"))


@pytest.mark.parametrize("parse", PARSERS)
@given(st.one_of(st.text(max_size=200), st.text(alphabet="JobId=1 \n|UsertNam/:0", max_size=200)))
def test_any_text_gives_records_or_our_error(parse: Callable[[str], Any], answer: str) -> None:
    try:
        parse(answer)
    except SlurmCommandError as error:
        assert error.next_step


@pytest.mark.parametrize("parse", PARSERS)
@given(st.data())
def test_a_damaged_answer_gives_records_or_our_error(
    parse: Callable[[str], Any], data: st.DataObject
) -> None:
    answer = text(data.draw(st.sampled_from(RECORDED)))
    start = data.draw(st.integers(0, len(answer)))
    length = data.draw(st.integers(0, 40))
    damaged = answer[:start] + data.draw(st.text(max_size=8)) + answer[start + length :]
    try:
        parse(damaged)
    except SlurmCommandError as error:
        assert error.next_step


@given(
    st.text(
        alphabet=st.characters(exclude_categories=["Cs", "Zl", "Zp"], exclude_characters="\n\r")
    ).filter(lambda name: name == name.strip())
)
def test_any_name_of_one_line_is_read_back(name: str) -> None:
    (record,) = parse_jobs(text("job_running").replace("JobName=train", f"JobName={name}"))
    assert record.name == name
    assert record.state is JobState.RUNNING


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("Epilog                  = (null)", False),
        ("Epilog                  = /etc/slurm/epilog.sh", True),
        ("EpilogSlurmctld         = /etc/slurm/e", True),
        ("Epilog[0]               = /etc/slurm/e", True),
        ("EpilogMsgTime           = 2000 usec", False),
    ],
)
def test_whether_nodes_are_cleaned_up_after_a_job(line: str, known: bool) -> None:
    text = f"Configuration data as of now\nClusterName             = hill\n{line}\n"
    assert parse_config(text).has_epilog is known


@pytest.mark.parametrize(
    ("key", "value", "attribute"),
    [
        ("SubmitTime", "2026-W47-6 02:07", "submit_time"),
        ("EndTime", "in 5 min", "end_time"),
        ("TimeLimit", "PT1H", "time_limit"),
        ("Requeue", "YES", "requeue"),
        ("ExitCode", "0:0:0", "exit_code"),
        ("Priority", "4.2e9", "priority"),
        ("NumNodes", "two", "num_nodes"),
        ("MinMemoryNode", "2 gigabytes", "memory_per_node"),
    ],
)
def test_a_value_in_a_form_not_known_here_costs_no_more_than_itself(
    key: str, value: str, attribute: str
) -> None:
    written = re.sub(rf"(?<=\b{key}=)\S+", value, text("job_running"), count=1)
    (record,) = parse_jobs(written, timezone.utc)
    assert getattr(record, attribute) is None
    (told,) = record.unrecognized
    assert (told.name, told.value) == (f"scontrol show job: {key}", value)
    whole = replace(job("job_running"), **{attribute: None}, unrecognized=(told,))
    assert record == whole


def test_a_state_not_known_here_is_told_and_no_error() -> None:
    written = text("job_running").replace("JobState=RUNNING", "JobState=HIBERNATING")
    (record,) = parse_jobs(written, timezone.utc)
    assert (record.state, record.state_text) == (JobState.UNKNOWN, "HIBERNATING")
    assert [each.value for each in record.unrecognized] == ["HIBERNATING"]
    (queued,) = parse_queue("7|7|HIBERNATING|None|tomorrow")
    assert (queued.state, queued.start_time) == (JobState.UNKNOWN, None)
    assert len(queued.unrecognized) == 2
    (past,) = parse_accounting("7|7|HIBERNATING|0:0|x|y|z")
    assert past.state is JobState.UNKNOWN and len(past.unrecognized) == 4


def test_a_configuration_keeps_what_can_be_read_of_it() -> None:
    written = re.sub(r"(?m)^KillWait .*$", "KillWait = soon", text("config"))
    config = parse_config(written)
    assert config.kill_wait is None and config.cluster_name is not None
    assert [str(each) for each in config.unrecognized] == ["scontrol show config: KillWait='soon'"]
