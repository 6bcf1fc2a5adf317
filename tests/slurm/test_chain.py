"""A run that is an array of tasks: each is an attempt, and nobody requeues anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_forge.journal import RunStatus
from slurm_forge.journal.events import RequeueDone
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.site.model import Site
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause
from tests.jobs import consumed
from tests.slurm.harness import REPOSITORY, Watched, environment, submit

SLURM_FORGE = (sys.executable, "-m", "slurm_forge.cli.main")
pytestmark = [pytest.mark.slurm]

STEPS = 60


def forbidden(folder: Path) -> Site:
    """A site on which no job may requeue itself."""
    rules = folder / "hill.yaml"
    rules.write_text("name: hill\nself_requeue_allowed: false\n")
    return find_site(str(rules))


def chained(slurm: SlurmCluster, folder: Path, name: str, tasks: int, **job) -> Watched:
    args = {"steps": STEPS, "pace": 0.1, **job.pop("args", {})}
    return submit(
        slurm,
        folder,
        name=name,
        site=forbidden(folder),
        nodes=2,
        args=args,
        template="array",
        chain=tasks,
        checkpoint={"every_steps": 5, "every_minutes": None},
        **job,
    )


def in_queue(slurm: SlurmCluster, watched: Watched) -> list[str]:
    """State and reason of each task of the run that waits or runs."""
    asked = slurm.run("squeue", "-h", "-r", "-j", watched.job, "-o", "%i %T %r", check=False)
    return asked.stdout.splitlines()


def told(slurm: SlurmCluster, watched: Watched, verb: str) -> str:
    """What the command line says, asked as a person would."""
    words = (verb, *(("--site", "generic") if verb == "requeue" else ()))
    with environment(slurm, watched.run.path.parent / "nodes"):
        done = subprocess.run(
            [*SLURM_FORGE, words[0], str(watched.run.path), *words[1:]],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=slurm.deadline(60),
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_three_tasks_finish_a_run_where_nothing_may_requeue_itself(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Each preempted one is cancelled by Slurm; what is left of the array goes with the run."""
    whole = submit(
        slurm, tmp_path, name="whole", nodes=2, partition="normal", args={"steps": STEPS}
    )
    whole.wait_finished()

    watched = chained(slurm, tmp_path, "chained", 5, partition="cancel")
    for number in (1, 2):
        watched.wait_step(5 * number + 5, attempt=number)
        running = watched.state.attempts[-1].job
        assert running == f"{watched.job}_{number}"
        slurm.preempt(running)
        watched.wait(lambda s, n=number: s.attempts[n - 1].outcome == "next task", 60, "its end")
        watched.wait(lambda s, n=number: len(s.attempts) > n, 60, f"task {number + 1}")
    state = watched.wait_finished()

    assert [each.job for each in state.attempts] == [f"{watched.job}_{n}" for n in (1, 2, 3)]
    assert {i.cause for a in state.attempts for _, i in a.incidents} == {Cause.PREEMPTED}
    events = [event for _, event in watched.events(RequeueDone)]
    followed = [event.successor for event in events if isinstance(event, RequeueDone)]
    assert followed == [f"{watched.job}_{n}" for n in (2, 3)]
    assert consumed(watched.run.path) == consumed(whole.run.path)
    assert watched.digest() == whole.digest()
    slurm.wait_for(lambda: not in_queue(slurm, watched), 30, "the tasks that are left to be gone")
    accounting = ("sacct", "-n", "-X", "-P", "-j", watched.job, "-o", "JobID,State")
    slurm.wait_for(
        lambda: f"{watched.job}_3|COMPLETED" in slurm.run(*accounting).stdout,
        30,
        "accounting to say of the task that finished the run that it was not cancelled",
    )
    story = told(slurm, watched, "explain")
    assert f"continues as task {watched.job}_2 of its array" in story, story


@pytest.mark.slow
def test_held_tasks_start_only_when_a_person_wants_the_run_to_go_on(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    watched = chained(
        slurm,
        tmp_path,
        "held",
        3,
        partition="normal",
        inject=["exception@12:rank0"],
        recovery={"app_error": [{"do": "hold"}]},
    )
    watched.wait(lambda s: s.status is RunStatus.HELD, 90, "the run to be held")
    slurm.wait_for(
        lambda: (
            len(lines := in_queue(slurm, watched)) == 2
            and all("PENDING JobHeld" in line for line in lines)
        ),
        30,
        "both tasks to wait, held",
    )
    comment = slurm.run("squeue", "-h", "-j", watched.job, "-o", "%k").stdout
    assert "slurm_forge: app_error" in comment
    # An administrator who releases nothing, but has Slurm look again, starts nothing.
    slurm.run("scontrol", "reconfigure")
    assert len(watched.state.attempts) == 1

    assert "released" in told(slurm, watched, "requeue")
    state = watched.wait_finished()
    assert [each.job for each in state.attempts] == [f"{watched.job}_{n}" for n in (1, 2)]
    slurm.wait_for(lambda: not in_queue(slurm, watched), 30, "the last task to be gone")


@pytest.mark.slow
def test_a_chain_that_is_used_up_rests_and_a_person_asks_for_another(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Two tasks end at their time limit; the site lets nothing come back by itself."""
    watched = chained(
        slurm,
        tmp_path,
        "short",
        2,
        partition="normal",
        minutes=1,
        lead="15s",
        args={"pace": 2.0},
    )
    state = watched.wait(lambda s: s.status is RunStatus.HELD, 200, "the chain to be used up")
    assert "this was the last of 2 tasks" in state.reason
    assert len(state.attempts) == 2
    assert {i.cause for a in state.attempts for _, i in a.incidents} == {Cause.TIME_LIMIT}
    slurm.wait_for(lambda: not in_queue(slurm, watched), 60, "nothing to wait in the queue")
    assert "slurm-forge requeue" in told(slurm, watched, "status")
    assert "submitted as job" in told(slurm, watched, "requeue")
    again = watched.wait(lambda s: len(s.attempts) == 3, 60, "the new chain")
    assert again.attempts[-1].job.endswith("_1")
    slurm.run("scancel", again.attempts[-1].job.partition("_")[0])
    watched.wait(lambda s: s.status is RunStatus.CANCELLED, 60, "the end of it")


@pytest.mark.slow
def test_a_cancelled_task_takes_the_others_out_of_the_way(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    watched = chained(slurm, tmp_path, "cancelled", 3, partition="normal")
    watched.wait_step(5)
    slurm.run("scancel", f"{watched.job}_1")
    watched.wait(lambda s: s.status is RunStatus.CANCELLED, 60, "the run to be cancelled")
    slurm.wait_for(
        lambda: (
            [line.split()[1:] for line in in_queue(slurm, watched)]
            == [["PENDING", "JobHeldAdmin"]] * 2
        ),
        60,
        "both others to be held",
    )
    assert len(watched.state.attempts) == 1
