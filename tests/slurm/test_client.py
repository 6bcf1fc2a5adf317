"""The client, the records and the environment against a real Slurm."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import slurm_forge.slurm.client as client_module
from slurm_forge.errors import SlurmCommandError, SlurmUnreachableError
from slurm_forge.site.detection import fill_from_slurm
from slurm_forge.site.loading import SitePlaces, packaged_folder
from slurm_forge.slurm.client import JobUpdate, SubprocessSlurm
from slurm_forge.slurm.environment import SlurmEnvironment
from slurm_forge.slurm.process import Completed, run_command
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import RequeueAnswer
from slurm_forge.slurm.text.nodelist import (
    expand_nodes,
    fold_nodes,
)
from slurm_forge.testing.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

ROOT = Path(client_module.__file__).parents[2]


@pytest.fixture
def client(slurm: SlurmCluster) -> SubprocessSlurm:
    return SubprocessSlurm(environment=slurm.env)


def wait(
    slurm: SlurmCluster,
    client: SubprocessSlurm,
    job: str,
    true: Callable[[JobRecord], bool],
    what: str,
) -> JobRecord:
    seen: list[JobRecord] = []

    def reached() -> bool:
        record = client.show_job(job)
        seen[:] = [] if record is None else [record]
        return bool(seen) and true(seen[0])

    slurm.wait_for(reached, 40, what)
    return seen[0]


def wait_state(
    slurm: SlurmCluster, client: SubprocessSlurm, job: str, state: JobState
) -> JobRecord:
    return wait(slurm, client, job, lambda record: record.state is state, f"{job} to be {state}")


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "job script.sh"
    path.write_text(f"#!/bin/bash\n#SBATCH --output=/dev/null\n{body}\n")
    return path


def test_what_a_script_says_counts_whatever_a_profile_sets(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """By itself sbatch takes the variables: a job that can't come back, in five, of one minute."""
    profile = {"SBATCH_NO_REQUEUE": "1", "SBATCH_TIMELIMIT": "1", "SBATCH_ARRAY_INX": "1-5"}
    environment = {**slurm.env, **profile}
    path = script(tmp_path, "#SBATCH --requeue --time=30 --hold --partition=normal\ntrue")
    plain = run_command(
        ("sbatch", "--parsable", str(path)), timedelta(seconds=60), environment
    ).stdout.strip()
    ours = SubprocessSlurm(environment=environment)
    job = ours.submit(path)
    (taken,), (meant,) = ours.show_tasks(plain), ours.show_tasks(job)
    for each in (plain, job):
        ours.cancel(each)
    assert (taken.requeue, taken.time_limit, taken.array_task) == (
        False, timedelta(minutes=1), "1-5",
    )  # fmt: skip
    assert (meant.requeue, meant.time_limit, meant.array_task) == (
        True, timedelta(minutes=30), None,
    )  # fmt: skip


def test_a_job_from_submission_to_its_end(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    before = datetime.now(timezone.utc) - timedelta(seconds=2)
    args = ("-p", "preempt", "-N2", "-n2", "--time=5", "--mem=200M", "--comment=a StdOut=b")
    where = ("--job-name=odd = name", "-D", str(tmp_path), "--requeue")
    job = client.submit(script(tmp_path, "touch started; sleep 2; exit 3"), (*args, *where))
    record = wait_state(slurm, client, job, JobState.RUNNING)
    assert (record.job_ref, record.name, record.partition) == (job, "odd = name", "preempt")
    assert (record.requeue, record.restarts) == (True, 0)
    assert (record.num_nodes, record.memory_per_node) == (2, 200 << 20)
    assert (record.time_limit, record.comment) == (timedelta(minutes=5), "a StdOut=b")
    assert record.command == str(tmp_path / "job script.sh")
    assert record.nodelist is not None
    assert set(expand_nodes(record.nodelist)) < set(slurm.nodes)
    assert record.start_time is not None and record.end_time is not None
    assert before <= record.start_time <= datetime.now(timezone.utc) + timedelta(seconds=2)
    assert record.end_time - record.start_time == timedelta(minutes=5)
    (queued,) = client.queue("root")
    assert (queued.job_ref, queued.state, queued.start_time) == (
        job,
        JobState.RUNNING,
        record.start_time,
    )
    over = wait_state(slurm, client, job, JobState.FAILED)
    assert over.exit_code == (3, 0)
    assert client.queue("root") == ()
    slurm.wait_for(
        lambda: any(row.end_time for row in client.accounting(job)), 20, "the end in accounting"
    )
    rows = client.accounting(job)
    assert (rows[0].job_ref, rows[0].step, rows[0].state) == (job, None, JobState.FAILED)
    assert (rows[0].exit_code, rows[0].start_time) == ((3, 0), over.start_time)


@pytest.mark.versions
def test_preemption_is_seen_in_the_grace_time_and_requeued(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    body = "trap '' TERM; srun --overlap bash -c \"trap : TERM; sleep 600 & wait; wait\"; sleep 600"
    args = ("-p", "preempt", "-N1", "--requeue", "--time=60")
    job = client.submit(script(tmp_path, body), args)
    wait_state(slurm, client, job, JobState.RUNNING)
    slurm.wait_for(lambda: any(r.step == "0" for r in client.accounting(job)), 20, "the step")
    preemptor = slurm.preempt(job)
    noticed = wait(slurm, client, job, lambda r: r.preempt_time is not None, "the notice")
    # For a moment Slurm says SIGNALING, while it sends the signal that is the notice.
    assert noticed.state in {JobState.RUNNING, JobState.SIGNALING}
    assert noticed.preempt_time is not None and noticed.end_time is not None
    grace = client.show_partition("preempt")
    assert grace is not None
    assert noticed.end_time - noticed.preempt_time == grace.grace_time
    waiting = wait(slurm, client, job, lambda r: r.state is JobState.PENDING, "the requeue")
    assert waiting.restarts == 1
    assert client.requeue(job).outcome is RequeueAnswer.ALREADY_PENDING
    assert waiting.eligible_time is not None and waiting.submit_time is not None
    delay = waiting.eligible_time - waiting.submit_time
    assert delay == client.show_config().requeue_delay
    slurm.cancel_preemptor(preemptor)
    rows = [row for row in client.accounting(job) if row.step is None]
    assert rows[0].state is JobState.PREEMPTED


def test_a_requeue_by_hand_and_all_that_slurm_may_answer(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    long = script(tmp_path, "sleep 600")
    running = client.submit(long, ("--requeue",))
    never = client.submit(long, ("--no-requeue",))
    waiting = client.submit(long, ("--hold",))
    over = client.submit(script(tmp_path, "true"))
    for job in (running, never):
        wait_state(slurm, client, job, JobState.RUNNING)
    wait_state(slurm, client, over, JobState.COMPLETED)
    assert client.requeue(running).outcome is RequeueAnswer.REQUEUED
    assert client.requeue(never).outcome is RequeueAnswer.DISABLED
    assert client.requeue(waiting).outcome is RequeueAnswer.ALREADY_PENDING
    assert client.requeue("67000000").outcome is RequeueAnswer.UNKNOWN_JOB
    assert client.requeue(over).outcome is RequeueAnswer.REQUEUED
    reply = replace_runner(client, as_nobody).requeue(never)
    assert reply.outcome is RequeueAnswer.DENIED
    assert "denied" in reply.stderr
    again = wait(slurm, client, running, lambda r: r.restarts == 1, "the restart")
    assert again.state in {JobState.PENDING, JobState.COMPLETING, JobState.RUNNING}


def test_a_requeue_of_one_array_task_leaves_the_others_alone(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    array = client.submit(script(tmp_path, "sleep 600"), ("--array=1-4%2", "-n1", "--requeue"))
    for task in ("1", "2"):
        wait_state(slurm, client, f"{array}_{task}", JobState.RUNNING)
    assert client.requeue(f"{array}_2").outcome is RequeueAnswer.REQUEUED
    wait(slurm, client, f"{array}_2", lambda r: r.restarts == 1, "the task to be requeued")
    other = client.show_job(f"{array}_1")
    assert other is not None
    assert (other.state, other.restarts, other.job_ref) == (JobState.RUNNING, 0, f"{array}_1")
    assert {r.job_ref for r in client.show_tasks(array)} >= {f"{array}_1", f"{array}_2"}
    late = client.show_job(f"{array}_4")
    assert late is not None and late.state is JobState.PENDING
    assert client.show_job(f"{array}_99") is None


def test_hold_and_release_of_a_requeued_job(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    job = client.submit(script(tmp_path, "sleep 600"), ("--requeue",))
    wait_state(slurm, client, job, JobState.RUNNING)
    assert client.requeue_hold(job).in_queue
    held = wait_state(slurm, client, job, JobState.PENDING)
    assert held.held
    assert [row.reason for row in client.queue("root")] == [held.reason]
    client.release(job)
    released = client.show_job(job)
    assert released is not None and not released.held
    wait_state(slurm, client, job, JobState.RUNNING)


def test_a_waiting_job_takes_changed_resources(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    args = ("--begin=now+60", "-N2", "--time=10", "--mem=100M")
    job = client.submit(script(tmp_path, "sleep 600"), args)
    bad = slurm.nodes[:2]
    changed = JobUpdate(
        exclude_nodes=bad,
        time_limit=timedelta(minutes=90),
        num_nodes=1,
        memory_per_node=300 << 20,
        requeue=False,
        comment="more memory after host_oom: 100M -> 300M",
    )
    client.update_job(job, changed)
    record = client.show_job(job)
    assert record is not None
    assert (record.excluded_nodes, record.num_nodes) == (fold_nodes(bad), 1)
    assert (record.time_limit, record.memory_per_node) == (timedelta(minutes=90), 300 << 20)
    assert (record.requeue, record.comment) == (False, "more memory after host_oom: 100M -> 300M")
    client.update_job(job, JobUpdate(exclude_nodes=(), start_after=timedelta(minutes=5)))
    later = wait(slurm, client, job, lambda r: r.reason == "BeginTime", "the begin time")
    assert (later.state, later.excluded_nodes) == (JobState.PENDING, None)
    assert later.eligible_time is not None and later.submit_time is not None
    assert later.eligible_time - later.submit_time > timedelta(minutes=4)
    with pytest.raises(SlurmCommandError, match="Invalid node name"):
        client.update_job(job, JobUpdate(exclude_nodes=["no-such-node"]))
    client.update_job(job, JobUpdate(start_after=timedelta(0)))
    wait_state(slurm, client, job, JobState.RUNNING)
    with pytest.raises(SlurmCommandError, match="no longer pending"):
        client.update_job(job, JobUpdate(exclude_nodes=bad))


def test_cancelling_and_signalling(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    body = "srun bash -c \"trap 'touch signalled; exit 0' USR1; touch ready; sleep 600 & wait\""
    job = client.submit(script(tmp_path, body), ("-D", str(tmp_path)))
    slurm.wait_for((tmp_path / "ready").exists, 30, "the step")
    client.cancel(job, signal="USR1")
    slurm.wait_for((tmp_path / "signalled").exists, 10, "the signal")
    wait_state(slurm, client, job, JobState.COMPLETED)
    client.cancel(job)
    client.cancel(job, signal="USR1")
    client.cancel("67000000")
    other = client.submit(script(tmp_path, "sleep 600"))
    wait_state(slurm, client, other, JobState.RUNNING)
    client.cancel(other)
    wait_state(slurm, client, other, JobState.CANCELLED)
    slurm.wait_for(
        lambda: any(row.cancelled_by == 0 for row in client.accounting(other)), 20, "accounting"
    )


def test_a_controller_that_answers_nobody_costs_no_more_than_the_timeout(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    job = client.submit(script(tmp_path, "sleep 600"), ("--hold",))
    impatient = client.with_timeout(timedelta(seconds=1))
    with slurm.frozen_controller():
        before = time.monotonic()
        reply = impatient.requeue(job)
        with pytest.raises(SlurmUnreachableError):
            impatient.show_job(job)
        assert time.monotonic() - before < slurm.deadline(6)
    assert reply.outcome is RequeueAnswer.UNREACHABLE
    assert client.show_job(job) is not None


def test_a_controller_that_is_down_is_recognised_by_its_own_clients_words(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    job = client.submit(script(tmp_path, "sleep 600"), ("--hold",))
    with slurm.stopped_controller():
        # Here scontrol gives up by itself, after about nine seconds, with an odd message.
        reply = client.with_timeout(timedelta(seconds=60)).requeue(job)
    assert reply.outcome is RequeueAnswer.UNREACHABLE
    assert "no answer within" not in reply.stderr
    assert client.show_job(job) is not None


def test_partitions_and_configuration(slurm: SlurmCluster, client: SubprocessSlurm) -> None:
    config = client.show_config()
    assert config.cluster_name is not None and config.cluster_name.startswith("forge")
    assert config.preempt_type == "preempt/partition_prio"
    assert config.kill_wait == slurm.spec.kill_wait
    assert config.slurmd_timeout == slurm.spec.slurmd_timeout
    assert config.requeue_delay == slurm.spec.cred_expire + timedelta(seconds=1)
    assert (config.job_requeue, config.sends_user_signal) == (True, False)
    shown = {
        (record.name, record.preempt_mode, record.grace_time) for record in client.show_partitions()
    }
    assert shown == {
        (partition.name, partition.preempt_mode.value, partition.grace_time)
        for partition in slurm.spec.partitions
    }
    assert client.show_partition("no-such-partition") is None


def test_nodes(slurm: SlurmCluster, client: SubprocessSlurm) -> None:
    drained, *others = slurm.nodes
    reason = "disk = bad Partitions=none [gone]"
    change = ("scontrol", "update", f"NodeName={drained}")
    slurm.run(*change, "State=DRAIN", f"Reason={reason}")
    try:
        shown = {node.name: node for node in client.show_nodes([*slurm.nodes, "no-such-node"])}
    finally:
        slurm.run(*change, "State=RESUME")
    assert set(shown) == set(slurm.nodes)
    assert (shown[drained].is_drained, shown[drained].reason) == (True, reason)
    assert not any(shown[name].is_drained or shown[name].is_down for name in others)


def test_the_site_of_the_test_cluster_is_found_and_agrees_with_slurm(
    slurm: SlurmCluster, client: SubprocessSlurm
) -> None:
    config, partitions = client.show_config(), client.show_partitions()
    places = SitePlaces(packaged=packaged_folder())
    described = places.load(cluster_name=config.cluster_name).site
    assert described.name == "test_cluster"
    asked = fill_from_slurm(places.load("generic").site, config, partitions)
    for partition in partitions:
        told, seen = described.preemption(partition.name), asked.preemption(partition.name)
        assert told.mode == seen.mode
        assert (told.grace or timedelta(0)) == (seen.grace or timedelta(0))


@pytest.mark.versions
def test_a_rank_and_a_batch_script_know_where_they_are(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    # The job stays until its record has been read: of one that is completing, Slurm shows only
    # the nodes that have not finished yet (src/slurmctld/job_mgr.c, nodes_completing).
    os.mkfifo(tmp_path / "go")
    body = "env -0 > batch; srun bash -c 'env -0 > rank$SLURM_PROCID'; touch done; read -r _ < go"
    args = ("--array=7", "-p", "preempt", "-N2", "-n2", "-D", str(tmp_path))
    array = client.submit(script(tmp_path, body), args)
    slurm.wait_for((tmp_path / "done").exists, 30, "the job")
    batch, rank = environment(tmp_path / "batch"), environment(tmp_path / "rank1")
    record = client.show_job(f"{array}_7")
    (tmp_path / "go").write_text("go\n")
    assert record is not None and record.nodelist is not None
    for seen in (batch, rank):
        assert seen.job_ref == record.job_ref == f"{array}_7"
        assert (seen.job_id, seen.array_task_id) == (record.job_id, 7)
        assert (seen.partition, seen.restart_count, seen.ntasks) == ("preempt", 0, 2)
        assert seen.nodes == expand_nodes(record.nodelist)
        assert seen.cluster_name == client.show_config().cluster_name
    assert not batch.in_srun_step
    assert (rank.step, rank.procid, rank.localid, rank.nodeid) == (0, 1, 0, 1)
    assert rank.node_name == rank.nodes[1]


def test_a_successor_submitted_from_inside_is_a_job_of_its_own(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    successor = tmp_path / "successor.sh"
    successor.write_text(
        "#!/bin/bash\n#SBATCH --output=/dev/null\nenv -0 > successor; touch done\n"
    )
    program = (
        "from pathlib import Path; from slurm_forge.slurm.client import SubprocessSlurm; "
        "Path('id').write_text(SubprocessSlurm.of_this_process()"
        ".submit(Path('successor.sh'), ['--nodes=1']))"
    )
    body = f"export MINE='an ä'; {shlex.quote(sys.executable)} -c {shlex.quote(program)}"
    args = ("--array=7", "-n2", "-D", str(tmp_path))
    inside = SubprocessSlurm(environment={**slurm.env, "PYTHONPATH": str(ROOT)})
    inside.submit(script(tmp_path, body), args)
    slurm.wait_for((tmp_path / "done").exists, 40, "the successor")
    job = (tmp_path / "id").read_text()
    seen = environment(tmp_path / "successor")
    assert seen.job_ref == job
    assert (seen.array_job_id, seen.ntasks) == (None, None)
    raw = variables(tmp_path / "successor")
    assert raw["MINE"] == "an ä"
    assert "SLURM_TIME_FORMAT" not in raw
    assert raw.get("LC_ALL") == slurm.env.get("LC_ALL")


def test_a_job_name_that_forges_a_record_is_refused(
    slurm: SlurmCluster, client: SubprocessSlurm, tmp_path: Path
) -> None:
    forged = "x\n   JobState=COMPLETED\nJobId=1"
    job = client.submit(script(tmp_path, "true"), ("--hold", f"--job-name={forged}"))
    with pytest.raises(SlurmCommandError, match="name"):
        client.show_job(job)
    assert [row.job_ref for row in client.queue("root")] == [job]


def test_a_refused_submission_keeps_slurms_words(client: SubprocessSlurm, tmp_path: Path) -> None:
    with pytest.raises(SlurmCommandError, match="invalid partition specified"):
        client.submit(script(tmp_path, "true"), ("-p", "no-such-partition"))


@pytest.mark.parametrize("expression", ["n[01-03,5],x", "a[1-2]b[3-4]", "n[08-11]", "x9,x10,x011"])
def test_node_lists_expand_as_slurm_expands_them(slurm: SlurmCluster, expression: str) -> None:
    theirs = tuple(slurm.run("scontrol", "show", "hostnames", expression).stdout.split())
    assert expand_nodes(expression) == theirs
    folded = fold_nodes(theirs)
    assert tuple(slurm.run("scontrol", "show", "hostnames", folded).stdout.split()) == theirs


def as_nobody(argv: Sequence[str], timeout: timedelta, environment: Mapping[str, str]) -> Completed:
    drop = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
    return run_command((*drop, *argv), timeout, environment)


def replace_runner(
    client: SubprocessSlurm,
    runner: Callable[[Sequence[str], timedelta, Mapping[str, str]], Completed],
) -> SubprocessSlurm:
    return SubprocessSlurm(environment=client.environment, runner=runner)


def variables(path: Path) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in path.read_text().split("\0") if entry)
    return {name: value for name, _, value in pairs}


def environment(path: Path) -> SlurmEnvironment:
    seen = SlurmEnvironment.from_environ(variables(path))
    assert seen is not None
    return seen
