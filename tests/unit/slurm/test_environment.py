from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import ConfigError
from slurm_forge.slurm.environment import SlurmEnvironment, SpecialStep
from slurm_forge.slurm.versions import Unrecognized

TASK = {
    "SLURM_JOB_ID": "8812301",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "n[01-04]",
    "SLURM_STEP_NODELIST": "n[01-03]",
    "SLURMD_NODENAME": "n03",
    "SLURM_JOB_PARTITION": "preempt-nograce",
    "SLURM_CLUSTER_NAME": "test",
}


def read(**changes: str) -> SlurmEnvironment:
    environment = SlurmEnvironment.from_environ({**TASK, **changes})
    assert environment is not None
    return environment


def test_a_rank_finds_its_place() -> None:
    environment = read()
    assert (environment.job_id, environment.step, environment.procid) == (8812301, 3, 5)
    assert (environment.localid, environment.nodeid, environment.ntasks) == (1, 2, 8)
    assert environment.nodes == ("n01", "n02", "n03", "n04")
    assert environment.node_name == "n03"
    assert environment.partition == "preempt-nograce"
    assert environment.job_ref == "8812301"


def test_outside_a_job_there_is_none() -> None:
    assert SlurmEnvironment.from_environ({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}) is None


def test_a_first_start_has_no_restart_count_and_a_later_one_has() -> None:
    assert read().restart_count == 0
    assert read(SLURM_RESTART_COUNT="3").restart_count == 3


def test_an_array_task_is_never_named_by_the_bare_array_id() -> None:
    # One task's SLURM_JOB_ID is the array's own id: requeueing it would requeue every task.
    environment = read(SLURM_ARRAY_JOB_ID="8812301", SLURM_ARRAY_TASK_ID="0")
    assert environment.job_ref == "8812301_0"


def test_the_end_is_read_where_slurm_gives_it() -> None:
    assert read().end_time is None
    environment = read(SLURM_JOB_END_TIME="1700003600")
    assert environment.end_time == datetime(2023, 11, 14, 23, 13, 20, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("0", 0),
        ("4294967280", 4294967280),
        # As 26.05 writes them, and as others do that print them without a sign.
        ("-5", SpecialStep.BATCH),
        ("4294967291", SpecialStep.BATCH),
        ("-4", SpecialStep.EXTERN),
        ("4294967290", SpecialStep.INTERACTIVE),
        ("-3", SpecialStep.PENDING),
    ],
)
def test_a_reserved_step_id_is_no_step_of_sruns(text: str, step: int | SpecialStep) -> None:
    environment = read(SLURM_STEP_ID=text)
    assert environment.step == step
    assert environment.in_srun_step is isinstance(step, int)
    assert environment.unrecognized == ()


@pytest.mark.parametrize("text", ["-7", "4294967289", "s7XQ.batch", "- 5"])
def test_a_step_of_a_kind_not_known_here_is_no_error(text: str) -> None:
    environment = read(SLURM_STEP_ID=text)
    assert environment.step is SpecialStep.UNKNOWN
    assert environment.unrecognized == (Unrecognized("SLURM_STEP_ID", text),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SLURM_JOB_ID", "1; x"),
        ("SLURM_JOB_ID", "$(reboot)"),
        ("SLURM_JOB_ID", "12\n"),
        ("SLURM_JOB_ID", "-1"),
        ("SLURM_JOB_ID", "\N{SUPERSCRIPT TWO}"),
        ("SLURM_ARRAY_TASK_ID", "1,2"),
        ("SLURM_PROCID", "0x1"),
        ("SLURM_JOB_NODELIST", "n1;x"),
        ("SLURM_JOB_NODELIST", "n[0-999999999]"),
    ],
)
def test_what_names_the_job_or_a_rank_is_refused_where_slurm_would_not_write_it(
    name: str, text: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        SlurmEnvironment.from_environ({**TASK, name: text})
    assert refusal.value.next_step


@pytest.mark.parametrize(
    ("name", "text", "attribute"),
    [
        ("SLURM_RESTART_COUNT", "many", "restart_count"),
        ("SLURMD_NODENAME", "../n1", "node_name"),
        ("SLURM_JOB_PARTITION", "--clusters=other", "partition"),
        ("SLURM_CLUSTER_NAME", "a b", "cluster_name"),
        ("SLURM_JOB_END_TIME", "99999999999999999", "end_time"),
        ("SLURM_JOB_END_TIME", "2026-11-21T09:17:00", "end_time"),
    ],
)
def test_what_a_run_can_do_without_is_left_out_and_told(
    name: str, text: str, attribute: str
) -> None:
    environment = read(**{name: text})
    assert not getattr(environment, attribute)
    assert environment.unrecognized == (Unrecognized(name, text),)


def test_the_batch_step_does_without_the_numbers_of_a_rank() -> None:
    environment = read(SLURM_STEP_ID="-5", SLURM_PROCID="0/4", SLURM_NTASKS="8(x2)")
    assert (environment.procid, environment.ntasks) == (None, None)
    assert [each.name for each in environment.unrecognized] == ["SLURM_PROCID", "SLURM_NTASKS"]


@given(st.dictionaries(st.sampled_from(sorted(TASK)), st.text(max_size=12)))
def test_any_environment_gives_a_value_or_our_error(changes: dict[str, str]) -> None:
    try:
        environment = SlurmEnvironment.from_environ({**TASK, **changes})
    except ConfigError:
        return
    assert environment is None or environment.job_ref.replace("_", "").isdigit()
