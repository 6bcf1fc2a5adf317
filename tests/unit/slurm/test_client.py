from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.slurm.client import COMMAND_NOT_FOUND, JobUpdate, Slurm, SubprocessSlurm
from slurm_forge.slurm.process import Completed
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import RequeueAnswer

DATA = Path(__file__).parent / "data"
DOWN = "Unable to contact slurm controller (connect failure)"


class Script:
    """Answers every command with the same text and remembers what it was asked."""

    def __init__(self, out: str = "", err: str = "", returncode: int | None = 0) -> None:
        self.answer = (returncode, out, err)
        self.asked: list[tuple[str, ...]] = []
        self.environments: list[Mapping[str, str]] = []
        self.timeouts: list[timedelta] = []

    def __call__(
        self, argv: Sequence[str], timeout: timedelta, environment: Mapping[str, str]
    ) -> Completed:
        self.asked.append(tuple(argv))
        self.environments.append(environment)
        self.timeouts.append(timeout)
        return Completed(tuple(argv), *self.answer)


def client(script: Script, **environment: str) -> SubprocessSlurm:
    return SubprocessSlurm(environment=environment, runner=script)


def test_the_real_client_is_what_the_protocol_asks_for() -> None:
    slurm: Slurm = SubprocessSlurm(environment={})
    assert slurm is not None


# Messages of Slurm 22.05.8, recorded.
@pytest.mark.parametrize(
    ("err", "outcome", "in_queue"),
    [
        ("Job is pending execution for job 2", RequeueAnswer.ALREADY_PENDING, True),
        ("6_2: Job is pending execution", RequeueAnswer.ALREADY_PENDING, True),
        (
            "Requested operation is presently disabled for job 4",
            RequeueAnswer.DISABLED,
            False,
        ),
        ("Access/permission denied for job 4", RequeueAnswer.DENIED, False),
        ("Invalid user id for job 7", RequeueAnswer.DENIED, False),
        (
            "Only batch jobs are accepted or processed for job 9",
            RequeueAnswer.NOT_BATCH,
            False,
        ),
        ("Invalid job id specified for job 99999", RequeueAnswer.UNKNOWN_JOB, False),
        ("Job not heterogeneous job leader for job 19", RequeueAnswer.NOT_LEADER, False),
        ("Unexpected message received for job 5", RequeueAnswer.UNREACHABLE, False),
        (f"slurm_load_jobs error: {DOWN}", RequeueAnswer.UNREACHABLE, False),
        (
            "Job can not be altered now, try again later for job 5",
            RequeueAnswer.TRY_AGAIN,
            False,
        ),
        ("A wording of the future for job 5", RequeueAnswer.REFUSED, False),
    ],
)
def test_what_slurm_says_to_a_requeue(err: str, outcome: RequeueAnswer, in_queue: bool) -> None:
    reply = client(Script(err=err + "\n", returncode=1)).requeue("5")
    assert reply.outcome is outcome
    assert reply.in_queue is in_queue
    assert err in reply.stderr


def test_a_requeue_that_was_taken() -> None:
    script = Script()
    assert client(script).requeue("8812301_4").outcome is RequeueAnswer.REQUEUED
    assert client(script).requeue_hold("5").in_queue
    assert script.asked == [("scontrol", "requeue", "8812301_4"), ("scontrol", "requeuehold", "5")]


def test_a_requeue_without_an_answer_is_an_outcome_and_not_an_exception() -> None:
    reply = client(Script(returncode=None, err="waiting")).requeue("5")
    assert reply.outcome is RequeueAnswer.UNREACHABLE
    assert "no answer within 20 s" in reply.stderr


@pytest.mark.parametrize(
    "err",
    [
        f"slurm_load_jobs error: {DOWN}",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Protocol authentication error",
        "scontrol: fatal: Could not establish a configuration source",
        "scontrol: fatal: Unable to process configuration file",
        "sacct: error: Problem talking to the database: Connection refused",
    ],
)
def test_no_answer_is_told_from_a_refusal(err: str) -> None:
    with pytest.raises(SlurmUnreachableError) as failure:
        client(Script(err=err, returncode=1)).show_job("5")
    assert failure.value.next_step
    assert err.rsplit(":", maxsplit=1)[-1].strip() in str(failure.value)


def test_a_command_that_never_comes_back_is_unreachable() -> None:
    with pytest.raises(SlurmUnreachableError, match="no answer within 3 s"):
        client(Script(returncode=None)).with_timeout(timedelta(seconds=3)).show_config()


def test_without_slurm_installed_the_user_is_told_what_to_do() -> None:
    slurm = SubprocessSlurm(environment={"PATH": "/nonexistent"})
    with pytest.raises(SlurmUnreachableError, match="load its Slurm module") as failure:
        slurm.show_config()
    assert "scontrol can't be started" in str(failure.value)
    assert "slurm-forge run trains on this machine" in failure.value.next_step
    assert "python -m slurm_forge.testing.cluster up" in failure.value.next_step


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (BlockingIOError(errno.EAGAIN, "fork"), RequeueAnswer.UNREACHABLE),
        (OSError(errno.ENOMEM, "fork"), RequeueAnswer.UNREACHABLE),
        (OSError(errno.EMFILE, "pipe"), RequeueAnswer.UNREACHABLE),
        (OSError(errno.ESTALE, "exec"), RequeueAnswer.UNREACHABLE),
        (FileNotFoundError(errno.ENOENT, "exec"), RequeueAnswer.NO_COMMAND),
        (PermissionError(errno.EACCES, "exec"), RequeueAnswer.NO_COMMAND),
        (NotADirectoryError(errno.ENOTDIR, "exec"), RequeueAnswer.NO_COMMAND),
    ],
)
def test_a_command_that_can_not_be_started_now_is_told_from_one_that_is_not_there(
    error: OSError, outcome: RequeueAnswer
) -> None:
    def fails(argv: Sequence[str], timeout: timedelta, environment: Mapping[str, str]) -> Completed:
        raise error

    slurm = SubprocessSlurm(environment={}, runner=fails)
    assert slurm.requeue("5").outcome is outcome
    with pytest.raises(SlurmUnreachableError) as failure:
        slurm.show_job("5")
    missing = outcome is RequeueAnswer.NO_COMMAND
    assert (failure.value.returncode == COMMAND_NOT_FOUND) is missing
    assert ("load its Slurm module" in failure.value.next_step) is missing
    assert ("try again" in failure.value.next_step) is not missing


# Slurm 22.05.8 on a machine that has its packages and belongs to no cluster, recorded.
NO_CLUSTER = (
    "scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
    "scontrol: error: fetch_config: DNS SRV lookup failed\n"
    "scontrol: error: _establish_config_source: failed to fetch config\n"
    "scontrol: fatal: Could not establish a configuration source\n"
)


def test_slurm_without_a_cluster_is_one_line_and_what_to_do_without_one() -> None:
    with pytest.raises(SlurmUnreachableError) as failure:
        client(Script(err=NO_CLUSTER, returncode=1)).show_config()
    first, *rest = str(failure.value).splitlines()
    assert first == "scontrol failed with exit status 1: Could not establish a configuration source"
    assert "slurm-forge run trains on this machine" in "\n".join(rest)
    assert failure.value.stderr == NO_CLUSTER  # nothing is lost to a program


def test_a_controller_that_is_away_is_asked_again_later() -> None:
    words = f"slurm_load_ctl_conf error: {DOWN}"
    with pytest.raises(SlurmUnreachableError, match=r"try again when it does") as failure:
        client(Script(err=words, returncode=1)).show_config()
    assert "slurm-forge run" not in failure.value.next_step


def test_a_refusal_keeps_slurms_words() -> None:
    words = "Invalid node name specified for job 7"
    with pytest.raises(SlurmCommandError, match=words) as failure:
        client(Script(err=words, returncode=1)).update_job("7", JobUpdate(exclude_nodes=["n9"]))
    assert not isinstance(failure.value, SlurmUnreachableError)


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ("invalid partition specified: prempt", "`sinfo -s`"),
        ("Invalid account or account/partition combination specified", "resources.account"),
        ("Invalid qos specification", "resources.qos"),
        ("Requested node configuration is not available", "Run it by hand"),
    ],
)
def test_what_sbatch_refuses_ends_with_what_to_correct(
    words: str, step: str, tmp_path: Path
) -> None:
    with pytest.raises(SlurmCommandError, match=words) as failure:
        client(Script(err=f"sbatch: error: {words}", returncode=1)).submit(tmp_path / "job.sbatch")
    assert step in failure.value.next_step


@pytest.mark.parametrize(
    ("out", "err"),
    [
        ("", "slurm_load_jobs error: Invalid job id specified"),
        ("Job 6_99 not found\n", ""),
    ],
)
def test_a_job_that_slurm_does_not_know_is_none(out: str, err: str) -> None:
    assert client(Script(out, err, 1)).show_job("6_99") is None


def test_a_partition_that_is_not_there_is_none() -> None:
    assert client(Script("Partition nope not found\n", "", 1)).show_partition("nope") is None


def test_nodes_are_asked_for_in_one_call_and_unknown_ones_left_out() -> None:
    script = Script((DATA / "nodes.txt").read_text())
    slurm = client(script)
    assert slurm.show_nodes(()) == ()
    shown = slurm.show_nodes(["s3n1", "s3n2", "s3n3", "s3n4"])
    assert [node.name for node in shown] == ["s3n1", "s3n2", "s3n3", "s3n4"]
    assert script.asked == [("scontrol", "show", "node", "s3n[1-4]")]
    # Recorded, 22.05.8: of several names it answers for those it knows, and fails.
    answer = "NodeName=n1 Arch=x86_64 \n   State=IDLE ThreadsPerCore=1\n\nNode nope not found\n"
    partly = client(Script(answer, "", 1))
    assert [node.name for node in partly.show_nodes(["n1", "nope"])] == ["n1"]
    assert client(Script("Node nope not found\n", "", 1)).show_nodes(["nope"]) == ()
    with pytest.raises(SlurmCommandError):
        client(Script("", "slurm_load_node error: Access/permission denied", 1)).show_nodes(["n1"])
    with pytest.raises(ConfigError):
        slurm.show_nodes(["n1;x"])


def test_of_an_array_the_wanted_task_is_shown() -> None:
    slurm = client(Script((DATA / "job_array.txt").read_text()))
    assert [record.job_ref for record in slurm.show_tasks("42")] == ["42", "42_2", "42_1"]
    for job, job_id in (("42_1", 47), ("48", 48), ("42", 42)):
        record = slurm.show_job(job)
        assert record is not None
        assert record.job_id == job_id


def test_a_waiting_task_shares_its_record_and_is_never_taken_for_a_running_one() -> None:
    waiting = client(Script((DATA / "job_array.txt").read_text())).show_job("42_5")
    assert waiting is not None
    assert (waiting.array_task, waiting.state) == ("3-6%2", JobState.PENDING)
    assert client(Script((DATA / "job_array_task.txt").read_text())).show_job("42_1") is None


def test_submitting_names_the_script_and_reads_the_id(tmp_path: Path) -> None:
    script = Script("8812301;cluster\n")
    job = client(script).submit(tmp_path / "-a b.sh", ["--dependency=afterany:17"])
    assert job == "8812301"
    expected = ("sbatch", "--parsable", "--dependency=afterany:17", str(tmp_path / "-a b.sh"))
    assert script.asked == [expected]


def test_a_submission_has_a_longer_timeout_than_a_question(tmp_path: Path) -> None:
    script = Script("17\n")
    slurm = client(script).with_timeout(timedelta(seconds=2))
    slurm.submit(tmp_path / "job.sh")
    slurm.hold("17")
    assert script.timeouts == [timedelta(seconds=120), timedelta(seconds=2)]


def test_a_question_is_asked_in_an_environment_that_does_not_change_the_answer() -> None:
    script = Script()
    inherited = {
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "PATH": "/opt/slurm/bin",
        "LC_ALL": "de_DE.UTF-8",
        "SLURM_TIME_FORMAT": "relative",
        "SQUEUE_PARTITION": "gpu",
        "SACCT_FORMAT": "JobName",
        "SLURM_BITSTR_LEN": "8",
    }
    client(script, **inherited).hold("5")
    expected = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    kept = {name: inherited[name] for name in ("SLURM_CONF", "PATH")}
    assert script.environments == [{**kept, **expected}]


def test_a_job_gets_the_users_environment_and_nothing_of_ours(tmp_path: Path) -> None:
    script = Script("17\n")
    inherited = {"LC_ALL": "de_DE.UTF-8", "SBATCH_QOS": "low", "SLURM_HINT": "nomultithread"}
    client(script, **inherited).submit(tmp_path / "job.sh")
    assert script.environments == [inherited]


def test_variables_of_sbatch_do_not_win_over_the_script(tmp_path: Path) -> None:
    """To sbatch they would: one run in many jobs, that can't come back, and ends after a minute."""
    script = Script("17\n")
    inherited = {
        "SBATCH_ACCOUNT": "me",
        "SBATCH_ARRAY_INX": "1-10",
        "SBATCH_JOB_NAME": "other",
        "SBATCH_MEM_PER_NODE": "1G",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_OPEN_MODE": "truncate",
        "SBATCH_PARTITION": "gpu",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_WAIT": "1",
    }
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH --job-name=x --mem=4G -t 60\n#SBATCH --requeue\n"
        "#SBATCH --open-mode=append\ntrue\n#SBATCH --partition=cpu\n"
    )
    client(script, **inherited).submit(tmp_path / "job.sh")
    assert set(script.environments[0]) == {"SBATCH_ACCOUNT", "SBATCH_PARTITION"}


def test_a_successor_does_not_inherit_what_describes_its_predecessor(tmp_path: Path) -> None:
    script = Script("17\n")
    inside = {
        "PATH": "/bin",
        "SLURM_CONF": "/run/slurm.conf",
        "SLURM_JOB_ID": "9",
        "SLURM_ARRAY_JOB_ID": "8",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_RESTART_COUNT": "4",
        "SLURM_NTASKS": "8",
        "SLURMD_NODENAME": "n1",
        "SRUN_CPUS_PER_TASK": "7",
        "SLURM_FORGE_RUNS": "/scratch/me/runs",
        "SLURM_FORGE_ATTEMPT": "3",
    }
    client(script, **inside).submit(tmp_path / "job.sh")
    names = set(script.environments[0])
    # Without the folder of runs a successor would begin a run of its own.
    assert names == {"PATH", "SLURM_CONF", "SRUN_CPUS_PER_TASK", "SLURM_FORGE_RUNS"}


def test_an_update_says_exactly_what_is_to_change() -> None:
    script = Script()
    everything = JobUpdate(
        exclude_nodes=["n1", "n2", "n4"],
        time_limit=timedelta(hours=48),
        num_nodes=3,
        memory_per_node=(2 << 30) + 1,
        start_after=timedelta(seconds=7.2),
        requeue=True,
        comment="held: see explain",
    )
    client(script).update_job("5", everything)
    assert script.asked == [
        (
            "scontrol",
            "update",
            "JobId=5",
            "ExcNodeList=n[1-2,4]",
            "TimeLimit=2-00:00:00",
            "NumNodes=3-3",
            "MinMemoryNode=2049",
            "StartTime=now+8",
            "Requeue=1",
            "Comment=held: see explain",
        )
    ]


@pytest.mark.parametrize(
    ("update", "assignment"),
    [
        (JobUpdate(exclude_nodes=()), "ExcNodeList="),
        (JobUpdate(start_after=timedelta(0)), "StartTime=now"),
        (JobUpdate(requeue=False), "Requeue=0"),
        (JobUpdate(comment=""), "Comment="),
    ],
)
def test_a_value_that_looks_like_nothing_is_still_set(update: JobUpdate, assignment: str) -> None:
    assert update.assignments() == (assignment,)


def test_an_empty_update_asks_nobody() -> None:
    script = Script()
    client(script).update_job("5", JobUpdate())
    assert script.asked == []


@pytest.mark.parametrize(
    "job", ["", "-1", "5,6", "5 6", "5\n", "--all", "5_[1-3%2]", "5_[]", "x", "5;id", "٣"]
)
def test_what_is_no_single_job_reaches_no_command(job: str) -> None:
    script = Script()
    slurm = client(script)
    calls = [
        slurm.show_job,
        slurm.requeue,
        slurm.requeue_hold,
        slurm.hold,
        slurm.release,
        slurm.cancel,
        slurm.accounting,
        lambda job: slurm.update_job(job, JobUpdate(requeue=True)),
    ]
    for call in calls:
        with pytest.raises(ConfigError):
            call(job)
    assert script.asked == []


def test_tasks_that_wait_together_are_changed_together_and_nothing_else() -> None:
    script = Script()
    slurm = client(script)
    tasks = "5_[1,3-4]"
    for call in (slurm.show_job, slurm.requeue, slurm.requeue_hold, slurm.cancel, slurm.accounting):
        with pytest.raises(ConfigError):
            call(tasks)
    slurm.hold(tasks)
    slurm.release(tasks)
    slurm.update_job(tasks, JobUpdate(requeue=True))
    slurm.cancel_waiting("5")
    assert script.asked == [
        ("scontrol", "hold", tasks),
        ("scontrol", "release", tasks),
        ("scontrol", "update", f"JobId={tasks}", "Requeue=1"),
        ("scancel", "--state=PENDING", "5"),
    ]


def test_other_words_are_checked_too() -> None:
    script = Script()
    slurm = client(script)
    for call in (
        lambda: slurm.queue("root --all"),
        lambda: slurm.show_partition("-x"),
        lambda: slurm.cancel("5", signal="USR1 --user=root"),
        lambda: slurm.update_job("5", JobUpdate(comment="a\nb")),
        lambda: slurm.update_job("5", JobUpdate(exclude_nodes=["n1;x"])),
    ):
        with pytest.raises(ConfigError):
            call()
    assert script.asked == []


def test_cancelling_and_signalling() -> None:
    script = Script()
    slurm = client(script)
    slurm.cancel("5")
    slurm.cancel("5", signal="USR1")
    slurm.cancel("5", signal="TERM", batch=True)
    assert script.asked == [
        ("scancel", "5"),
        ("scancel", "--signal=USR1", "5"),
        ("scancel", "--signal=TERM", "--batch", "5"),
    ]


def test_nothing_to_cancel_is_no_error_and_being_refused_is() -> None:
    over = "scancel: error: Kill job error on job id 5: Invalid job id specified"
    client(Script(err=over, returncode=1)).cancel("5", signal="USR1")
    denied = "scancel: error: Kill job error on job id 5: Access/permission denied"
    with pytest.raises(SlurmCommandError, match="denied"):
        client(Script(err=denied, returncode=1)).cancel("5")


def test_a_cluster_without_accounting_has_no_rows() -> None:
    slurm = client(Script(err="Slurm accounting storage is disabled", returncode=1))
    assert slurm.accounting("5") == ()
