"""The verbs that read: on a run that is finished, and on those that earlier versions wrote."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.acceptance.command import Project, causes

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

#: Run directories as versions wrote them (tests/golden/make_runs.py); never written anew.
KEPT = Path(__file__).parents[1] / "golden" / "runs"
VERSIONS = sorted(path.name for path in KEPT.iterdir())


@pytest.fixture(scope="module", params=VERSIONS)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The folder in which an earlier version has trained, moved here."""
    project = Project(tmp_path_factory.mktemp("kept"))
    version = KEPT / request.param
    shutil.copytree(version, project.folder / "runs", ignore=shutil.ignore_patterns("*.yaml"))
    for run in ("finished", "interrupted"):
        shutil.copy(version / f"{run}.yaml", project.folder)
        text = (version / run / "run.yaml").read_text()
        text = text.replace("/golden/bin/python", sys.executable)
        place = project.folder / "runs" / run / "run.yaml"
        place.write_text(text.replace("/tmp/golden", str(project.folder)))
    for path in (project.folder, *project.folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)  # a checkout has other modes
    return project


def test_runs_are_listed(kept: Project) -> None:
    listed = kept.forge("status", "--json").json["runs"]
    assert {each["run"]: each["status"] for each in listed} == {
        "finished": "finished",
        "interrupted": "stopped",
    }


def test_status_of_a_finished_one(kept: Project) -> None:
    status = kept.status("finished")
    assert (status["status"], status["attempt"], status["world_size"]) == ("finished", 2, 2)
    assert (status["step"], status["total_steps"], status["checkpoint"]["step"]) == (40, 40, 40)
    assert "finished" in kept.forge("status", "finished").out


def test_explain_tells_the_preemption_and_the_skipped_step(kept: Project) -> None:
    story = kept.explain("finished")
    assert causes(story) == ["preempted"]
    assert story["repeated_steps"] == 0
    assert [each["parameter"] for each in story["changes"]] == ["skipped"]
    text = kept.forge("explain", "finished").out
    assert "preempted" in text
    assert "1 update skipped (step 26: 8 samples without effect)" in text
    assert kept.forge("explain", "finished", "--attempt", "1").code == 0


def test_checkpoints_are_listed_and_whole(kept: Project) -> None:
    listed = kept.forge("checkpoints", "list", "finished", "--json").json["checkpoints"]
    assert next(each["step"] for each in listed if each["where"] == "disk") == 40
    verified = kept.forge("checkpoints", "verify", "finished", "--json").json["checkpoints"]
    assert {each["verdict"] for each in verified} == {"whole"}
    assert len(verified) >= 2


def test_a_damaged_checkpoint_is_found(kept: Project, project: Project) -> None:
    shutil.copytree(kept.folder / "runs", project.folder / "runs")
    damaged = project.saved("finished")[-1] / "rank-00000.data"
    body = bytearray(damaged.read_bytes())
    body[100] ^= 1
    damaged.write_bytes(body)
    done = project.forge("checkpoints", "verify", "finished", "--json")
    assert done.code == 1
    assert [each["step"] for each in done.json["checkpoints"] if each["verdict"] != "whole"] == [40]


def test_trust_is_a_persons_to_give_and_take(kept: Project) -> None:
    assert kept.forge("checkpoints", "suspect", "finished", "30", "--reason", "odd").code == 0
    listed = kept.forge("checkpoints", "list", "finished", "--json").json["checkpoints"]
    assert {each["step"]: each["trust"] for each in listed}[30] == "suspect"
    assert kept.forge("checkpoints", "promote", "finished", "30", "--reason", "fine").code == 0
    listed = kept.forge("checkpoints", "list", "finished", "--json").json["checkpoints"]
    assert {each["step"]: each["trust"] for each in listed}[30] == "good"


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_export_writes_what_load_state_dict_takes(kept: Project, ending: str) -> None:
    done = kept.forge("export", "finished", "--to", f"model.{ending}", "--json")
    assert (done.code, done.json["tensors"]) == (0, 2), done.text
    if ending == "pt":
        weights = torch.load(kept.folder / "model.pt", weights_only=True)
        torch.nn.Linear(4, 2).load_state_dict(weights)
    again = kept.forge("export", "finished", "--to", f"model.{ending}")
    assert again.code == 2, "a file is not replaced unasked"


def test_a_finished_run_is_neither_stopped_nor_brought_back(kept: Project) -> None:
    assert "finished already" in kept.forge("stop", "finished").text
    assert kept.forge("requeue", "finished").code == 2


def test_a_newer_kind_of_line_is_passed_over(kept: Project, project: Project) -> None:
    shutil.copytree(kept.folder / "runs", project.folder / "runs")
    journal = min((project.folder / "runs" / "finished" / "journal").glob("2-*.jsonl"))
    last = json.loads(journal.read_text().splitlines()[-1])
    line = {**last, "seq": last["seq"] + 1, "event": {"kind": "of_a_later_version", "x": 1}}
    with journal.open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert project.status("finished")["status"] == "finished"


def test_an_interrupted_one_is_resumed_to_its_end(kept: Project) -> None:
    status = kept.status("interrupted")
    assert status["status"] == "stopped"
    stopped_at = status["step"]
    assert 0 < stopped_at < 40
    done = kept.forge("run", "interrupted.yaml")
    assert done.code == 0, done.text
    story = kept.explain("interrupted")
    assert (story["status"], story["step"], story["repeated_steps"]) == ("finished", 40, 0)
    resumed = story["attempts"][-1]["launches"][0]["resumes"][0]
    assert resumed["step"] == stopped_at
    assert resumed["exact"] is True
