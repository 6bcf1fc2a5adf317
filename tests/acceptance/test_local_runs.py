"""``slurm-forge run``: what happens to a training on this machine, and how it goes on."""

from __future__ import annotations

import signal

import pytest

from tests.acceptance.command import SLURM_FORGE, Project, causes, finish, incidents, until

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

STEPS = 40
#: So many, at half a second each, that they last until a command has come through.
MANY = 400
SELDOM = {"every_steps": 1000, "every_minutes": None}


def test_stopped_and_saved_by_a_person_it_goes_on_to_the_same_weights(project: Project) -> None:
    """SAVE, SIGTERM for the command, and the same command again; beside one left in peace."""
    plain = project.job("plain", args={"steps": MANY})
    done = project.forge("run", plain)
    assert done.code == 0
    assert "Report: runs/plain/report.html" in done.out
    assert "plain finished at step 400" in project.report("plain")
    job = project.job("stopped", args={"steps": MANY, "pace": 0.5}, checkpoint=SELDOM)
    command = project.start(*SLURM_FORGE, "run", job)
    folder = project.folder / "runs" / "stopped"
    until(lambda: _trains(project, "stopped"), "the first step", every=0.5)
    assert project.forge("save", "stopped").code == 0
    until(lambda: project.saved("stopped"), "what was asked for by SAVE")
    assert not (folder / "SAVE").exists()
    command.send_signal(signal.SIGTERM)
    done = finish(command)
    assert done.code == 143, done.text
    status = project.status("stopped")
    assert status["status"] == "stopped"
    assert 0 < status["step"] < MANY
    assert status["checkpoint"]["step"] == status["step"], "steps were lost"

    project.write("go", "")
    done = project.forge("run", job)
    assert done.code == 0, done.text
    story = project.explain("stopped")
    assert causes(story) == ["stop_requested"]
    assert (len(story["attempts"]), story["repeated_steps"]) == (2, 0)
    expected, found = project.weights("plain", "plain.pt"), project.weights("stopped", "stopped.pt")
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)


def _trains(project: Project, run: str) -> bool:
    done = project.forge("status", run, "--json")
    return done.code == 0 and (done.json["step"] or 0) > 0


def test_the_verb_stop_ends_a_run_that_stays_stopped(project: Project) -> None:
    job = project.job("told", args={"steps": MANY, "pace": 0.5})
    command = project.start(*SLURM_FORGE, "run", job)
    until(lambda: project.saved("told"), "the first checkpoint")
    assert project.forge("stop", "told").code == 0
    done = finish(command)
    assert done.code == 1, done.text
    assert project.status("told")["status"] == "stopped"
    assert "stop_requested" in causes(project.explain("told"))


def test_bad_gradients_in_a_row_are_rolled_back(project: Project) -> None:
    job = project.job("rolled", args={"steps": STEPS}, inject=["nan@24x3"], report=False)
    done = project.forge("run", job)
    assert done.code == 0
    assert "Report:" not in done.out
    assert not (project.folder / "runs" / "rolled" / "report.html").exists()
    story = project.explain("rolled")
    (incident,) = incidents(story)
    assert incident["cause"] == "non_finite"
    assert incident["decision"]["action"] == "rollback"
    assert incident["decision"]["in_process"]
    assert incident["decision"]["target_step"] <= 20
    assert story["attempts"][0]["launches"][0]["number"] == 1
    assert len(story["attempts"]) == 1, "the process went on"


def test_out_of_memory_halves_the_micro_batch_and_nothing_else(project: Project) -> None:
    job = project.job("full", args={"steps": STEPS}, inject=["oom@15"])
    assert project.forge("run", job).code == 0
    story = project.explain("full")
    (incident,) = incidents(story)
    assert incident["cause"] == "cuda_oom"
    assert incident["decision"]["action"] == "shrink_micro_batch"
    assert incident["decision"]["plan"]["micro_batch"] == 4
    assert story["step"] == STEPS


def test_an_error_of_the_program_is_told_and_the_run_held_until_it_is_mended(
    project: Project,
) -> None:
    ladder = {"app_error": [{"do": "relaunch", "times": 1}]}
    job = project.job("broken", entry="failing.py:broken", recovery=ladder)
    done = project.forge("run", job)
    assert done.code == 1, done.text
    status = project.status("broken")
    assert status["status"] == "held"
    assert "the shards of the data are missing" in project.report("broken")
    told = project.forge("explain", "broken").out
    assert "the shards of the data are missing" in told
    assert "failing.py" in told
    project.write("mended", "")
    assert project.forge("run", job).code == 0
    assert project.status("broken")["status"] == "finished"


def test_a_foreign_program_is_started_again_and_finishes(project: Project) -> None:
    """It fails the first time, and keeps its place in a file of its own."""
    script = "[ -e failed ] || { touch failed; kill -9 $$; }; exec bash loop.sh out 3 0"
    words = ("exec", "--name", "own", "--progress-file", "out/done", "--", "bash", "-c", script)
    done = project.forge(*words)
    assert done.code == 0, done.text
    assert (project.folder / "out" / "all").read_text().split() == ["1", "2", "3"]
    story = project.explain("own")
    assert (story["status"], causes(story)) == ("finished", ["crash"])


def test_the_status_of_a_foreign_program_that_can_not_work_is_handed_on(project: Project) -> None:
    words = ("exec", "--name", "never", "--", "bash", "-c", "echo no such luck >&2; exit 3")
    done = project.forge(*words)
    assert done.code != 0
    assert "no such luck" in done.err
    assert project.status("never")["status"] == "held"


def test_a_script_attaches_itself(project: Project) -> None:
    done = project.run("python", "attached.py")
    assert done.code == 0, done.text
    assert "behind the block on rank 0" in done.out
    assert project.status("attached")["status"] == "finished"


def test_a_run_is_a_submitit_job(project: Project) -> None:
    """``ForgeJob`` in submitit's own local executor."""
    job = project.job("picked", args={"steps": 20})
    assert project.forge("render", job).code == 0
    done = project.run("python", "submitted.py", "local", str(project.folder / "runs" / "picked"))
    assert done.code == 0, done.text
    assert "picked: finished" in done.out
    assert project.status("picked")["status"] == "finished"
