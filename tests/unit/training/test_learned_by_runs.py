"""Runs that learn from each other's out-of-memory errors, launch by launch."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from torch import nn

from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.core.learned_micro_batch import (
    LearnedMicroBatch,
    fingerprint,
)
from slurm_forge.training.core.run_state import Registry

CPU = torch.device("cpu")
ENOUGH = 20


class Lab:
    """A folder of runs and a calendar."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = datetime(2026, 11, 21, tzinfo=timezone.utc)

    def run(self, name: str) -> RunDirectory:
        made = RunDirectory.at(self.folder / name)
        made.create(b"name: x\n")
        return made

    def launch(self, run: RunDirectory, *, width: int = 8, asked: int = 8, ranks: int = 4):
        registry = Registry()
        registry.add("model", nn.Linear(width, 2))
        return LearnedMicroBatch(
            run, registry, requested=asked, ranks=ranks, device=CPU, now=lambda: self.now
        )

    def shrunk(self, name: str) -> RunDirectory:
        """A run that asked for 8, ran out of memory, and was well with 4."""
        run = self.run(name)
        assert self.launch(run).suggest(None, fresh=True) == 8
        second = self.launch(run)
        assert second.suggest(4, fresh=False) == 4
        second.worked(4, ENOUGH)
        return run

    def files(self) -> list[Path]:
        return sorted((self.folder / ".learned").glob("*"))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "runs")


def test_a_run_that_never_ran_out_leaves_nothing(lab: Lab) -> None:
    learning = lab.launch(lab.run("a"))
    assert learning.suggest(None, fresh=True) == 8
    learning.worked(8, ENOUGH)
    assert lab.files() == []
    assert learning.notes() == []


def test_the_next_run_begins_with_what_fitted_and_says_so(lab: Lab) -> None:
    lab.shrunk("a")
    learning = lab.launch(lab.run("b"))
    assert learning.suggest(None, fresh=True) == 4
    (note,) = learning.notes()
    assert "micro-batch 4 instead of 8" in note
    assert f"rm {lab.files()[0]}" in note
    assert learning.notes() == []


@pytest.mark.parametrize("other", [{"width": 9}, {"asked": 16}, {"ranks": 2}])
def test_another_model_another_question_is_another_answer(lab: Lab, other: dict) -> None:
    lab.shrunk("a")
    asked = other.get("asked", 8)
    assert lab.launch(lab.run("b"), **other).suggest(None, fresh=True) == asked


def test_a_run_keeps_what_it_was_begun_with_whatever_others_learn(lab: Lab) -> None:
    steady = lab.run("steady")
    assert lab.launch(steady).suggest(None, fresh=True) == 8
    lab.shrunk("a")
    assert lab.launch(steady).suggest(None, fresh=False) == 8
    small = lab.run("small")
    assert lab.launch(small).suggest(None, fresh=True) == 4
    lab.now += timedelta(days=100)
    assert lab.launch(small).suggest(None, fresh=False) == 4
    # One that was begun before anybody asked goes on as it was.
    assert lab.launch(lab.run("older")).suggest(None, fresh=False) == 8


def test_a_larger_one_is_tried_again_and_works(lab: Lab) -> None:
    lab.shrunk("a")
    lab.now += timedelta(days=7)
    learning = lab.launch(lab.run("b"))
    assert learning.suggest(None, fresh=True) == 8
    assert "tried again" in learning.notes()[0]
    # Others that begin now wait for how it goes.
    assert lab.launch(lab.run("c")).suggest(None, fresh=True) == 4
    learning.worked(8, ENOUGH - 1)
    assert len(lab.files()) == 1
    learning.worked(8, ENOUGH)
    assert lab.files() == []
    assert lab.launch(lab.run("d")).suggest(None, fresh=True) == 8


def test_a_try_that_fails_is_counted_once_and_not_repeated_for_two_weeks(lab: Lab) -> None:
    lab.shrunk("a")
    lab.now += timedelta(days=7)
    trying = lab.run("b")
    assert lab.launch(trying).suggest(None, fresh=True) == 8
    for _ in range(3):  # relaunched, then preempted twice
        assert lab.launch(trying).suggest(4, fresh=False) == 4
    lab.now += timedelta(days=13)
    assert lab.launch(lab.run("c")).suggest(None, fresh=True) == 4
    lab.now += timedelta(days=1)
    assert lab.launch(lab.run("d")).suggest(None, fresh=True) == 8


def test_made_smaller_without_a_new_launch(lab: Lab) -> None:
    learning = lab.launch(lab.run("a"))
    assert learning.suggest(None, fresh=True) == 8
    learning.failed(8, 4)
    learning.worked(4, ENOUGH)
    assert lab.launch(lab.run("b")).suggest(None, fresh=True) == 4


def test_damaged_files_and_foreign_folders_are_notes_and_nothing_else(lab: Lab) -> None:
    lab.shrunk("a")
    lab.files()[0].write_text("{")
    learning = lab.launch(lab.run("b"))
    assert learning.suggest(None, fresh=True) == 8
    assert "is damaged" in learning.notes()[0]
    (lab.folder / ".learned").chmod(0o777)
    again = lab.launch(lab.run("c"))
    assert again.suggest(None, fresh=True) == 8
    again.failed(8, 4)
    again.worked(4, ENOUGH)
    assert any("other users" in note for note in again.notes())


def test_a_fingerprint_is_of_names_shapes_and_dtypes_not_of_values() -> None:
    def of(**models: nn.Module) -> str:
        registry = Registry()
        for name, model in models.items():
            registry.add(name, model)
        return fingerprint(registry)

    one = of(a=nn.Linear(2, 3), b=nn.Linear(1, 1))
    assert of(b=nn.Linear(1, 1), a=nn.Linear(2, 3)) == one
    assert of(a=nn.Linear(2, 3).half(), b=nn.Linear(1, 1)) != one
    assert of(a=nn.Linear(3, 2), b=nn.Linear(1, 1)) != one
    assert of(a=nn.Linear(2, 3), c=nn.Linear(1, 1)) != one
