"""Jobs that can't be started again: successors, held jobs and what a person does about them."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path

import pytest
import submitit
from submitit.slurm.slurm import SlurmJob

from slurm_forge.journal import RunStatus
from slurm_forge.launch.render.sbatch_options import leave_out
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.requeue.reconcile import bring_back
from slurm_forge.launch.submit.submission import (
    create_run,
    job_script,
    submit_script,
)
from slurm_forge.launch.submitit.job import ForgeJob
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import SubprocessSlurm
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.nodelist import expand_nodes
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile
from slurm_forge.testing.cluster import SlurmCluster
from tests.jobs import consumed
from tests.slurm.harness import REPOSITORY, Watched, environment

pytestmark = [pytest.mark.slurm]

STEPS = 80
ARGS = {"steps": STEPS, "pace": 0.1, "global_batch": 4}
HOLD_AT_ONCE = {"app_error": []}


def made(
    folder: Path, name: str, *, python: str = sys.executable, partition: str = "cancel", **job
) -> tuple[RunDirectory, RunFile]:
    spec = {
        "name": name,
        "entry": "tests/jobs.py:train",
        "args": ARGS,
        "resources": {
            "nodes": 1, "tasks_per_node": 1, "mem": "1500M", "time": "00:09:00",
            "partition": partition,
        },
        "checkpoint": {"every_steps": 20, "every_minutes": None},
        **job,
    }  # fmt: skip
    return create_run(
        job_from_mapping(spec),
        runs=folder / "runs",
        site=find_site("generic"),
        submitted_from=REPOSITORY,
        python=python,
    )


def forge(
    slurm: SlurmCluster,
    folder: Path,
    runs: list[tuple[RunDirectory, RunFile]],
    *,
    again: bool = False,
    **parameters,
) -> list[Watched]:
    """Submit runs through submitit; Slurm may start them ``again``, or refuses a requeue."""
    with environment(slurm):
        executor = submitit.AutoExecutor(folder, cluster="forge")
        executor.update_parameters(
            timeout_min=9,
            mem_gb=4,  # one run on a node: who preempts one must not preempt two
            slurm_additional_parameters={} if again else {"no-requeue": True},
            **parameters,
        )
        jobs = [ForgeJob(str(run.path)) for run, _ in runs]
        handles = executor.submit_array(jobs) if len(jobs) > 1 else [executor.submit(jobs[0])]
    return [
        Watched(slurm, run, file, handle.job_id, handle)
        for (run, file), handle in zip(runs, handles, strict=True)
    ]


def jobs_of(watched: Watched) -> list[str]:
    return [attempt.job for attempt in watched.state.attempts]


def test_a_cancelled_submitit_job_goes_on_in_successors_and_its_handle_follows(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    resources = {"nodes": 2, "tasks_per_node": 1}
    run = made(tmp_path, "chain", resources=resources)
    (watched,) = forge(
        slurm, tmp_path / "logs", [run], slurm_partition="cancel", nodes=2, tasks_per_node=1
    )
    first, handle = watched.job, watched.handle
    seen = set()
    for number in (1, 2):
        watched.wait_step(20 * number, attempt=number)
        slurm.preempt(jobs_of(watched)[-1])
        watched.wait(lambda s, n=number: len(s.attempts) > n, 90, f"attempt {number + 1}")
        with environment(slurm):
            assert slurm.job(first).state in ("PREEMPTED", "COMPLETED")
            assert not handle.done(force_check=True), "done while the run goes on"
            seen.add(handle.task(0).state)
    watched.wait_finished()

    assert seen <= {"PENDING", "RUNNING", "COMPLETING"}
    assert len(set(jobs_of(watched))) == 3
    assert sorted(consumed(watched.run.path)) == list(range(STEPS))
    with environment(slurm):
        assert handle.results() == ["chain: finished"] * 2
        assert handle.task(1).state == "COMPLETED"
        assert handle.task(0).stdout().count("Job completed successfully") == 1
        # Somebody who has no more than the id of the first job, and submitit itself.
        plain = SlurmJob(folder=handle.paths.folder, job_id=first, tasks=[0, 1])
        slurm.wait_for(plain.done, 30, "the results under the first job's id")
        assert plain.results() == ["chain: finished"] * 2
    assert stat.S_IMODE((watched.run.submissions / "submitted.pkl").stat().st_mode) == 0o600


@pytest.mark.slow
def test_a_task_of_an_array_has_its_own_successor(slurm: SlurmCluster, tmp_path: Path) -> None:
    runs = [made(tmp_path, f"task-{number}") for number in range(2)]
    folder = tmp_path / "it's logs"
    watched = forge(slurm, folder, runs, slurm_partition="cancel", slurm_setup=["true"])
    handles = [each.handle for each in watched]
    watched[1].wait_step(10)
    slurm.preempt(watched[1].job)
    for each in watched:
        each.wait_finished()
    assert jobs_of(watched[0]) == [watched[0].job]
    assert jobs_of(watched[1])[0] == watched[1].job
    assert len(jobs_of(watched[1])) == 2
    assert "_" not in jobs_of(watched[1])[1], "the whole array was submitted again"
    with environment(slurm):
        assert [handle.result() for handle in handles] == ["task-0: finished", "task-1: finished"]


@pytest.mark.slow
def test_cancelling_the_handle_ends_the_newest_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    (watched,) = forge(slurm, tmp_path / "%j", [made(tmp_path, "ended")], slurm_partition="cancel")
    watched.wait_step(10)
    slurm.preempt(watched.job)
    watched.wait_step(25, attempt=2)
    with environment(slurm):
        watched.handle.cancel()
    watched.wait(lambda s: s.status is RunStatus.CANCELLED, 60, "the end of the newest job")
    with environment(slurm):
        slurm.wait_for(lambda: watched.handle.done(force_check=True), 30, "the handle")
        assert watched.handle.state == "CANCELLED"
        with pytest.raises(submitit.core.utils.UncompletedJobError, match="slurm-forge requeue"):
            watched.handle.result()
        # A person lets it go on: by the same payload, under a third id.
        site = find_site("generic")
        client = SubprocessSlurm.of_this_process()
        brought = bring_back(watched.run, client, site=site, file=watched.file)
        assert brought.changed
        again = bring_back(watched.run, client, site=site, file=watched.file)
        assert (again.job, again.changed) == (brought.job, False)
        assert not watched.handle.done(force_check=True)
        watched.wait_finished()
        assert watched.handle.result() == "ended: finished"


def test_a_broken_environment_holds_the_job_until_somebody_repairs_it(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    python = tmp_path / "it's $(my) python"
    run, file = made(tmp_path, "broken", python=str(python), partition="normal", args={"steps": 3})
    site = find_site("generic")
    with environment(slurm):
        client = SubprocessSlurm.of_this_process()
        job = submit_script(run, file, site, client)
        slurm.wait_for(lambda: _waits_held(client, job), 120, "the job to be held")
        note = (run.submissions / f"not-started-{job}.txt").read_text()
        assert f"job {job} on " in note
        assert "No such file or directory" in note
        assert note.count(f"job {job} on ") == 2, "held at once, and other nodes not tried"
        first, second = re.findall(rf"job {job} on (\S+)", note)
        assert first != second
        assert stat.S_IMODE((run.submissions / f"not-started-{job}.txt").stat().st_mode) == 0o600
        record = client.show_job(job)
        assert record is not None
        assert "not started" in (record.comment or "")

        python.write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        brought = bring_back(run, client, site=site, file=file)
        assert (brought.job, brought.changed) == (job, True)
    watched = Watched(slurm, run, file, job)
    watched.wait_finished()
    assert jobs_of(watched) == [job]


@pytest.mark.slow
def test_a_setup_that_gives_up_holds_a_task_of_an_array_by_its_own_id(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    runs = [made(tmp_path, f"task-{number}", partition="normal") for number in range(2)]
    setup = ["set -e", '[ "$SLURM_ARRAY_TASK_ID" != 1 ] || ls /no/such/module']
    watched = forge(slurm, tmp_path / "it's logs", runs, again=True, slurm_setup=setup)
    job = watched[1].job
    with environment(slurm):
        client = SubprocessSlurm.of_this_process()
        slurm.wait_for(lambda: _waits_held(client, job), 120, "the task to be held")
    watched[0].wait_finished()
    note = (runs[1][0].submissions / f"not-started-{job}.txt").read_text()
    assert "before that: status 2 in line" in note
    assert not list(runs[0][0].submissions.glob("not-started-*"))


@pytest.mark.slow
def test_a_cancel_while_the_setup_runs_is_no_broken_environment(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    flag = tmp_path / "in-setup"
    run, file = made(
        tmp_path, "patience", partition="normal", setup=[f"bash -c 'touch {flag}; exec sleep 60'"]
    )
    with environment(slurm):
        client = SubprocessSlurm.of_this_process()
        job = submit_script(run, file, find_site("generic"), client)
        slurm.wait_for(flag.exists, 30, "the setup")
        slurm.run("scancel", job)
        slurm.wait_state(job, ["CANCELLED"], 60)
        record = client.show_job(job)
    assert record is not None
    assert record.state is JobState.CANCELLED
    # Bash hears of it when the command that runs has ended, which may be too late for a word.
    for note in run.submissions.glob("not-started-*"):
        assert "Slurm ended it" in note.read_text()


@pytest.mark.slow
def test_nodes_on_the_command_line_replace_those_of_the_script(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    nodes = slurm.nodes
    run, file = made(
        tmp_path,
        "excluded",
        partition="normal",
        resources={"exclude": nodes[0], "partition": "normal", "extra": {"hold": True}},
    )
    with environment(slurm):
        client = SubprocessSlurm.of_this_process()
        submit_script(run, file, find_site("generic"), client)
        alone = client.submit(job_script(run), (f"--exclude={nodes[1]}",))
        both = client.submit(job_script(run), leave_out(job_script(run).read_text(), [nodes[1]]))
        told = [client.show_job(job) for job in (alone, both)]
    left_out = [set(expand_nodes((record and record.excluded_nodes) or "")) for record in told]
    assert left_out == [{nodes[1]}, set(nodes[:2])]


def _waits_held(client: SubprocessSlurm, job: str) -> bool:
    record = client.show_job(job)
    return record is not None and record.state is JobState.PENDING and record.held


@pytest.mark.slow
def test_a_held_run_is_released_and_its_handle_follows(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = made(tmp_path, "wrong", args={**ARGS, "faults": ["exception@10"]}, recovery=HOLD_AT_ONCE)
    (watched,) = forge(slurm, tmp_path / "logs", [run], again=True)
    watched.wait(lambda s: s.status is RunStatus.HELD, 60, "the decision to hold")
    slurm.wait_for(lambda: watched.state.held is not None, 30, "the job to be held in the queue")
    with environment(slurm):
        client = SubprocessSlurm.of_this_process()
        assert watched.handle.done(force_check=True)
        assert watched.handle.state == "REQUEUE_HOLD"
        with pytest.raises(submitit.core.utils.UncompletedJobError, match="held: "):
            watched.handle.result()
        brought = bring_back(watched.run, client, site=find_site("generic"), file=watched.file)
        assert (brought.job, brought.changed, brought.submitted) == (watched.job, True, False)
        assert not watched.handle.done(force_check=True)
        watched.wait_finished()
        assert watched.handle.result() == "wrong: finished"
    assert set(jobs_of(watched)) == {watched.job}
