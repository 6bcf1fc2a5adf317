"""A run in which much happens: a bad gradient, a preemption, a rank that is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.acceptance.command import Project, incidents, until

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

STEPS = 40


@pytest.fixture(scope="module")
def eventful(shared: Project) -> Project:
    """Two ranks, three starts."""
    job = shared.job(
        "eventful",
        args={"steps": STEPS},
        resources={"tasks_per_node": 2},
        inject=["nan@8", "term@14:rank1", "kill@27:rank1"],
    )
    done = shared.forge("run", job)
    assert done.code == 0, done.text
    return shared


def test_it_finishes_by_itself(eventful: Project) -> None:
    status = eventful.status("eventful")
    assert (status["status"], status["step"], status["total_steps"]) == ("finished", STEPS, STEPS)
    assert (eventful.folder / "runs" / "eventful" / "DONE").exists()


def test_a_bad_gradient_is_skipped_and_told(eventful: Project) -> None:
    story = eventful.explain("eventful")
    (change,) = [each for each in story["changes"] if each["parameter"] == "skipped"]
    assert change["science"] is True
    launches = [launch for attempt in story["attempts"] for launch in attempt["launches"]]
    (skipped,) = [each for launch in launches for each in launch["skipped"]]
    assert skipped["first_step"] == skipped["last_step"] == 9
    assert any("not finite" in each["text"] for each in skipped["evidence"])


def test_a_preemption_by_signal_loses_no_step(eventful: Project) -> None:
    story = eventful.explain("eventful")
    first = incidents(story)[0]
    assert first["cause"] == "preempted"
    assert first["repeated_steps"] == 0
    assert first["resumed_step"] == first["step"]
    launch = story["attempts"][0]["launches"][0]
    assert launch["stop_checkpoint"]["reason"] == "stop"
    assert [notice["what"] for notice in launch["notices"]] == ["SIGTERM"]


def test_a_rank_that_is_killed_costs_the_steps_since_the_last_checkpoint(eventful: Project) -> None:
    crash = incidents(eventful.explain("eventful"))[1]
    assert crash["cause"] == "crash"
    # That of the stop, where the save of step 20 was still being written.
    assert crash["step"] - crash["resumed_step"] == crash["repeated_steps"] > 0
    assert crash["resumed_step"] >= incidents(eventful.explain("eventful"))[0]["step"]
    assert crash["recovered"]


def test_explain_says_it_in_words(eventful: Project) -> None:
    done = eventful.forge("explain", "eventful")
    assert done.code == 0
    for word in ("preempted", "crash", "1 update skipped", f"step {STEPS} of {STEPS}"):
        assert word in done.out


def test_a_finished_run_returns_at_once(eventful: Project) -> None:
    before = eventful.explain("eventful")["attempts"]
    done = eventful.forge("run", "eventful.yaml")
    assert done.code == 0, done.text
    assert eventful.explain("eventful")["attempts"] == before


def test_another_job_is_no_continuation(eventful: Project) -> None:
    done = eventful.forge("run", "eventful.yaml", "--set", "args.steps=50")
    assert done.code == 2
    assert "args" in done.err, done.err


def test_nobody_is_left_behind(eventful: Project) -> None:
    """Nothing of a run that has ended is alive."""
    mark = str(eventful.folder / "runs" / "eventful").encode()

    def living() -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    until(lambda: not living(), "the end of all of its processes", 60)
