"""The cluster that all other tests here rest on: it must be a real Slurm, and leave nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_forge.errors import ForgeError, SlurmCommandError, SlurmUnreachableError
from slurm_forge.testing.cluster import ClusterSpec, SlurmCluster, Tracking
from slurm_forge.testing.cluster.lifecycle import job_processes, step_daemons
from slurm_forge.testing.cluster.processes import command_line, with_environment, with_file_below

SOLO = ClusterSpec(nodes=1, accounting=False)

SLEEPERS = "srun bash -c 'echo up; exec sleep 120'"

# Ignores the first notice, as a job that saves does, and ends at the second.
STUBBORN = """
echo start ${SLURM_RESTART_COUNT:-0}
trap : TERM
srun bash -c 'n=0; trap "n=\\$((n+1)); echo notice \\$n" TERM
              while [ $n -lt 2 ]; do sleep 0.1; done' &
wait; wait
"""


def daemons_of(directory: Path) -> list[int]:
    marked = with_environment(f"SLURM_FORGE_TEST_CLUSTER={directory}")
    steps = with_file_below("slurmstepd", f"{directory}/")
    return [process.pid for process in (*marked, *steps)]


def running_again(slurm: SlurmCluster, job_id: str, timeout: float = 60) -> None:
    slurm.wait_for(
        lambda: "start 1" in slurm.output(job_id), timeout, f"job {job_id} to be started again"
    )


def test_a_step_runs_on_all_four_nodes(slurm: SlurmCluster) -> None:
    answer = slurm.run("srun", "-N4", "-n4", "bash", "-c", "echo $SLURMD_NODENAME")
    assert sorted(answer.stdout.split()) == list(slurm.nodes)


def test_gpus_are_given_to_jobs_that_ask_and_to_no_others(slurm: SlurmCluster) -> None:
    show = ("bash", "-c", "echo ${CUDA_VISIBLE_DEVICES-none}")
    assert slurm.run("srun", "--gres=gpu:2", *show).stdout.strip() == "0,1"
    assert slurm.run("srun", *show).stdout.strip() == "none"


def test_an_ordinary_user_can_submit(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch("id -un", "--output=/dev/null", user="nobody", cwd=Path("/"))
    record = slurm.wait_state(job_id, "COMPLETED")
    assert (record.field("UserId") or "").startswith("nobody(")


def test_preemption_without_notice_requeues_the_job(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch(STUBBORN, "--partition=preempt-nograce", "-N2", "--open-mode=append")
    slurm.wait_for(lambda: "start 0" in slurm.output(job_id), 20, "the first start")
    preemptor = slurm.preempt(job_id)
    slurm.wait_state(preemptor, "COMPLETED")
    running_again(slurm, job_id)
    assert slurm.job(job_id).restarts == 1
    states = [record.state for record in slurm.sacct(job_id) if record.job_id == job_id]
    assert states[0] == "PREEMPTED"


@pytest.mark.slow
def test_preemption_with_notice_tells_the_tasks_first(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch(STUBBORN, "--partition=preempt", "-N2", "--open-mode=append")
    slurm.wait_for(lambda: "start 0" in slurm.output(job_id), 20, "the first start")
    preemptor = slurm.preempt(job_id)
    slurm.wait_for(lambda: "notice 1" in slurm.output(job_id), 20, "the notice")
    noticed = slurm.job(job_id)
    assert noticed.state in {"RUNNING", "SIGNALING"}
    assert noticed.field("PreemptTime") is not None
    assert noticed.restarts == 0
    slurm.wait_state(preemptor, "COMPLETED", timeout=60)
    running_again(slurm, job_id)


@pytest.mark.slow
def test_the_cancel_partition_does_not_requeue(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch(STUBBORN, "--partition=cancel", "-N2", "--open-mode=append")
    slurm.wait_for(lambda: "start 0" in slurm.output(job_id), 20, "the first start")
    slurm.preempt(job_id)
    record = slurm.wait_state(job_id, "PREEMPTED", timeout=90)
    assert record.restarts == 0


def test_a_requeued_job_is_back_within_seconds(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch("echo start ${SLURM_RESTART_COUNT:-0}; sleep 60", "--open-mode=append")
    slurm.wait_for(lambda: "start 0" in slurm.output(job_id), 20, "the first start")
    slurm.run("scontrol", "requeue", job_id)
    running_again(slurm, job_id, timeout=20)


@pytest.mark.slow
def test_a_time_limit_of_one_minute_ends_the_job(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch("sleep 300", "--time=1")
    slurm.wait_state(job_id, "TIMEOUT", timeout=110)


def test_too_much_memory_is_recorded_as_out_of_memory(slurm: SlurmCluster) -> None:
    if not slurm.limits_memory:
        pytest.skip("no control groups here, so no memory limits")
    job_id = slurm.sbatch(f"exec {sys.executable} -c 'bytearray(400 << 20)'", "--mem=200M")
    over = slurm.wait_state(job_id, ("OUT_OF_MEMORY", "COMPLETED", "FAILED"))
    assert over.state == "OUT_OF_MEMORY"
    slurm.wait_for(
        lambda: "OUT_OF_MEMORY" in [record.state for record in slurm.sacct(job_id)],
        20,
        "accounting to say so too",
    )


def test_a_frozen_controller_answers_nobody_and_then_everybody(slurm: SlurmCluster) -> None:
    with slurm.frozen_controller(), pytest.raises(SlurmUnreachableError):
        slurm.run("squeue", timeout=2)
    slurm.run("squeue")


def test_a_stopped_controller_comes_back_with_its_jobs(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch("sleep 60")
    slurm.wait_state(job_id, "RUNNING")
    with slurm.stopped_controller(), pytest.raises((SlurmCommandError, SlurmUnreachableError)):
        slurm.run("squeue", timeout=5)
    assert slurm.job(job_id).state == "RUNNING"


def test_accounting_that_is_down_answers_nobody_and_nothing_else_is(slurm: SlurmCluster) -> None:
    with slurm.stopped_database():
        assert slurm.run("sacct", check=False).returncode != 0
        job_id = slurm.sbatch("true", "--output=/dev/null")
        slurm.wait_state(job_id, "COMPLETED")
    slurm.wait_for(lambda: bool(slurm.sacct(job_id)), 30, "accounting to hear of the job")


def test_the_processes_of_a_job_are_found_by_what_they_are(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch(SLEEPERS, "-N2", "--output=/dev/null")
    slurm.wait_for(lambda: len(slurm.tasks(job_id)) == 2, 30, "both tasks")
    words = {rank: command_line(process)[:2] for rank, process in slurm.tasks(job_id).items()}
    assert words == {0: ("sleep", "120"), 1: ("sleep", "120")}
    script = slurm.batch_script(job_id)
    assert script is not None and f"job{int(job_id):05d}/slurm_script" in command_line(script)[-2]
    assert len(slurm.step_daemons(job_id, "0")) == 2
    assert len(slurm.step_daemons(job_id, "batch")) == 1
    batch_host, other = slurm.nodes_of(job_id)
    assert slurm.job(job_id).field("BatchHost") == batch_host
    assert len(slurm.step_daemons(job_id, node=other)) == 1
    slurm.cancel(job_id)
    slurm.wait_for(lambda: not slurm.tasks(job_id), 30, "the tasks to be gone")
    assert slurm.batch_script(job_id) is None


def test_another_configuration_holds_inside_its_block_only(slurm: SlurmCluster) -> None:
    with slurm.configured(replace(slurm.spec, job_requeue=False)):
        job_id = slurm.sbatch("sleep 60")
        slurm.wait_state(job_id, "RUNNING")
        with pytest.raises(SlurmCommandError, match="disabled"):
            slurm.run("scontrol", "requeue", job_id)
    assert "JobRequeue              = 1" in slurm.run("scontrol", "show", "config").stdout


@pytest.mark.slow
def test_a_killed_node_fails_the_job_and_comes_back(slurm: SlurmCluster) -> None:
    script = f"echo start ${{SLURM_RESTART_COUNT:-0}}; {SLEEPERS}"
    job_id = slurm.sbatch(script, "-N2", "--open-mode=append")
    slurm.wait_for(lambda: slurm.output(job_id).count("up") == 2, 20, "both tasks")
    batch_host = slurm.job(job_id).field("BatchHost")
    lost = next(name for name in slurm.nodes[:2] if name != batch_host)
    slurm.kill_node(lost)
    assert step_daemons(slurm.layout, lost) == ()
    assert job_processes(slurm.layout, lost) == ()
    running_again(slurm, job_id, timeout=90)
    assert "NODE_FAIL" in [record.state for record in slurm.sacct(job_id)]
    assert lost not in slurm.run("sinfo", "-h", "-N", "-t", "idle,alloc,mix", "-o", "%N").stdout
    slurm.restart_node(lost)
    slurm.run("srun", "--nodelist", lost, "true")


@pytest.mark.slow
def test_a_node_that_only_lost_its_network_leaves_its_tasks_alive(slurm: SlurmCluster) -> None:
    job_id = slurm.sbatch(SLEEPERS, "-N2")
    slurm.wait_for(lambda: slurm.output(job_id).count("up") == 2, 20, "both tasks")
    batch_host = slurm.job(job_id).field("BatchHost")
    lost = next(name for name in slurm.nodes[:2] if name != batch_host)
    slurm.kill_node(lost, spare_tasks=True)
    assert step_daemons(slurm.layout, lost) == ()
    assert len(job_processes(slurm.layout, lost)) == 1


@pytest.mark.slow
def test_two_clusters_side_by_side_do_not_meet(slurm: SlurmCluster, slurm_directory: Path) -> None:
    mine = slurm.sbatch("sleep 60", "--nodelist", slurm.nodes[0])
    slurm.wait_state(mine, "RUNNING")
    with SlurmCluster(slurm_directory, SOLO) as other:
        assert not set(other.nodes) & set(slurm.nodes)
        theirs = other.sbatch("echo hello from $SLURMD_NODENAME")
        other.wait_state(theirs, "COMPLETED")
        assert other.output(theirs).strip() == f"hello from {other.nodes[0]}"
    assert daemons_of(slurm_directory) == []
    assert slurm.job(mine).state == "RUNNING"


def test_who_hears_a_signal_depends_on_the_tracking(
    slurm: SlurmCluster, slurm_directory: Path
) -> None:
    # The grandchild reports; the child, which Slurm signals in any case, only waits for it.
    script = """srun bash -c 'trap : TERM
        bash -c "trap \\"echo heard; exit\\" TERM
                 echo ready; for i in {1..300}; do sleep 0.1; done" &
        wait; wait'"""

    def hears(cluster: SlurmCluster) -> bool:
        job_id = cluster.sbatch(script)
        cluster.wait_for(lambda: "ready" in cluster.output(job_id), 20, "the grandchild")
        cluster.run("scancel", "--signal=TERM", job_id)
        try:
            cluster.wait_for(lambda: "heard" in cluster.output(job_id), 3, "the signal")
        except ForgeError:
            return False
        return True

    with SlurmCluster(slurm_directory, replace(SOLO, tracking=Tracking.LINUXPROC)) as other:
        assert other.tracking is Tracking.LINUXPROC
        assert hears(other)
    if slurm.tracking is Tracking.CGROUP:
        assert not hears(slurm)


@pytest.mark.parametrize("lose_state", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_a_crashed_cluster_left_is_cleared_away(
    slurm_directory: Path, needs_slurm: None, lose_state: bool
) -> None:
    crashed = SlurmCluster(slurm_directory, SOLO)
    crashed.start()
    job_id = crashed.sbatch("sleep 600")
    crashed.wait_state(job_id, "RUNNING")
    old = daemons_of(slurm_directory)
    for daemon in crashed.state.daemons:
        if daemon.name in ("slurmctld", "munged"):
            os.kill(daemon.process.pid, signal.SIGKILL)
    if lose_state:
        crashed.layout.state.unlink()
    with SlurmCluster(slurm_directory, SOLO) as again:
        assert not set(old) & set(daemons_of(slurm_directory))
        assert again.run("squeue", "-h").stdout == ""
        again.run("srun", "true")
    assert daemons_of(slurm_directory) == []


@pytest.mark.slow
def test_stopping_what_crashed_spares_who_took_its_node_names(
    slurm_directory: Path, needs_slurm: None
) -> None:
    with _killed_cluster(slurm_directory / "old") as old:
        with SlurmCluster(slurm_directory / "new", SOLO) as new:
            if new.nodes != old.nodes:
                pytest.skip("another cluster started in between and took the names")
            job_id = new.sbatch("sleep 60")
            new.wait_state(job_id, "RUNNING")
            old.stop()
            assert new.job(job_id).state == "RUNNING"
            new.run("srun", "true")


@contextlib.contextmanager
def _killed_cluster(directory: Path) -> Iterator[SlurmCluster]:
    """A cluster that ran, and of which nothing but its directory is left."""
    cluster = SlurmCluster(directory, SOLO)
    cluster.start()
    job_id = cluster.sbatch("sleep 600")
    cluster.wait_state(job_id, "RUNNING")
    for name in cluster.nodes:
        cluster.kill_node(name)
    for pid in daemons_of(directory):
        os.kill(pid, signal.SIGKILL)
    cluster.wait_for(lambda: not daemons_of(directory), 10, "the end of its daemons")
    yield cluster
    cluster.stop()


def test_a_running_cluster_is_not_started_over(slurm: SlurmCluster) -> None:
    with pytest.raises(ForgeError, match="already"):
        SlurmCluster(slurm.layout.directory).start()
    assert slurm.is_healthy()


def test_the_command_line_boots_runs_and_stops(slurm_directory: Path) -> None:
    def command(action: str, *rest: str) -> subprocess.CompletedProcess[str]:
        module = [sys.executable, "-m", "slurm_forge.testing.cluster"]
        return subprocess.run(
            [*module, action, "--dir", str(slurm_directory), *rest],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    assert command("status").returncode == 1
    up = command("up", "--nodes=2", "--no-accounting")
    try:
        assert up.returncode == 0, up.stderr
        assert command("status").returncode == 0
        again = command("up")
        assert again.returncode == 1
        assert "already" in again.stderr
        assert command("env").stdout == f"export SLURM_CONF={slurm_directory}/etc/slurm.conf\n"
        ran = command("exec", "--", "srun", "-N2", "hostname")
        assert len(ran.stdout.splitlines()) == 2
        assert command("exec", "--", "false").returncode == 1
    finally:
        down = command("down")
    assert down.returncode == 0
    assert daemons_of(slurm_directory) == []
    assert "cred_expire" in command("up", "--cred-expire=1").stderr
