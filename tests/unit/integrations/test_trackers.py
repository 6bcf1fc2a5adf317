from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_forge.errors import UnsupportedError
from slurm_forge.integrations import (
    mlflow_run_id,
    remember_mlflow_run,
    tensorboard_arguments,
    tracker_variables,
    wandb_arguments,
)
from slurm_forge.run_directory import RunDirectory, claim_attempt


@dataclass
class Tracked:
    directory: Path
    name: str = "my-run"
    step_number: int = 0
    restored: bool = True


def start(path: Path) -> None:
    run = RunDirectory.at(path)
    run.path.mkdir(exist_ok=True, mode=0o700)
    claim_attempt(run, job="1", restart_count=0, host="h", pid=1, nodes=(), time=0.0)


def test_every_start_of_a_run_is_the_same_wandb_run(tmp_path: Path) -> None:
    start(tmp_path / "a")
    first = wandb_arguments(Tracked(tmp_path / "a"))
    start(tmp_path / "a")
    assert wandb_arguments(Tracked(tmp_path / "a", step_number=7)) == first
    assert first["resume"] == "allow"
    assert first["name"] == "my-run"
    assert re.fullmatch(r"my-run-[0-9a-f]{16}", first["id"])


def test_another_run_of_the_same_name_is_another_wandb_run(tmp_path: Path) -> None:
    ids = set()
    for place in ("a", "b"):
        start(tmp_path / place)
        ids.add(wandb_arguments(Tracked(tmp_path / place))["id"])
    # The folder was removed, and a new run lives where the old one was.
    (tmp_path / "a").rename(tmp_path / "gone")
    start(tmp_path / "a")
    ids.add(wandb_arguments(Tracked(tmp_path / "a"))["id"])
    assert len(ids) == 3


def test_without_a_claim_the_place_makes_the_id(tmp_path: Path) -> None:
    one = wandb_arguments(Tracked(tmp_path / "a"))["id"]
    assert one == wandb_arguments(Tracked(tmp_path / "a"))["id"]
    assert one != wandb_arguments(Tracked(tmp_path / "b"))["id"]


@pytest.mark.parametrize("name", ["a/b#c?d%e:f\\g", "x" * 300, "ü"])
def test_the_id_is_one_that_wandb_takes(tmp_path: Path, name: str) -> None:
    found = wandb_arguments(Tracked(tmp_path, name=name))["id"]
    assert len(found) <= 64
    assert not set(found) & set("/\\#?%:")


def test_the_mlflow_run_is_found_again(tmp_path: Path) -> None:
    run = Tracked(tmp_path)
    assert mlflow_run_id(run) is None
    remember_mlflow_run(run, "0123456789abcdef0123456789abcdef")
    assert mlflow_run_id(Tracked(tmp_path, step_number=5)) == "0123456789abcdef0123456789abcdef"
    with pytest.raises(ValueError, match="not the id"):
        remember_mlflow_run(run, "../../etc")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"mlflow_run_id": 3}', '{"mlflow_run_id": "a b"}']
)
def test_a_damaged_file_makes_a_new_mlflow_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "trackers.json").write_text(text)
    assert mlflow_run_id(Tracked(tmp_path)) is None


def test_tensorboard_hides_what_is_written_again(tmp_path: Path) -> None:
    assert tensorboard_arguments(Tracked(tmp_path, step_number=7)) == {"purge_step": 8}
    assert tensorboard_arguments(Tracked(tmp_path), first=True) == {"purge_step": None}
    # An earlier launch ended before its first checkpoint: everything is written again.
    assert tensorboard_arguments(Tracked(tmp_path)) == {"purge_step": 0}


def test_tensorboard_before_the_step_is_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"run\.restore\(\) first"):
        tensorboard_arguments(Tracked(tmp_path, restored=False))


def variables(directory: Path, **given: str) -> dict[str, str]:
    found = tracker_variables(
        name="my-run", directory=directory, step=7, first=False, environment=given
    )
    return dict(found)


def test_a_program_that_knows_nothing_of_us_goes_on_too(tmp_path: Path) -> None:
    remember_mlflow_run(Tracked(tmp_path), "abc")
    assert variables(tmp_path) == {
        "WANDB_RUN_ID": wandb_arguments(Tracked(tmp_path))["id"],
        "WANDB_RESUME": "allow",
        "MLFLOW_RUN_ID": "abc",
        "SLURM_FORGE_TB_PURGE_STEP": "8",
    }


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    remember_mlflow_run(Tracked(tmp_path), "abc")
    purge = {"SLURM_FORGE_TB_PURGE_STEP": "8"}
    assert variables(tmp_path, WANDB_RUN_ID="mine", MLFLOW_RUN_ID="mine") == purge
    # A resume mode alone: with our id, theirs.
    assert set(variables(tmp_path, WANDB_RESUME="must")) == {
        "WANDB_RUN_ID",
        "MLFLOW_RUN_ID",
        *purge,
    }
    # A sweep gives ids itself.
    assert "WANDB_RUN_ID" not in variables(tmp_path, WANDB_SWEEP_ID="s")


def test_a_first_start_purges_nothing(tmp_path: Path) -> None:
    found = tracker_variables(name="r", directory=tmp_path, step=None, first=True, environment={})
    assert set(found) == {"WANDB_RUN_ID", "WANDB_RESUME"}


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    remember_mlflow_run(Tracked(tmp_path), "abc")
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"mlflow_run_id": "abc"}
