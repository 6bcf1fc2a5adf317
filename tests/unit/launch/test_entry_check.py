"""What is found out about an entry without importing anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.spec.entry import (
    check_entry,
    default_arguments,
    require_arguments,
)

JOB = Path("train.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pack" / "deep").mkdir(parents=True)
    (tmp_path / "pack" / "deep" / "model.py").write_text(
        "import torch_that_is_not_here\n"
        "try:\n    from fast import train\nexcept ImportError:\n    from slow import train\n"
        "if True:\n    def other(run): ...\n"
        "made, = (lambda run: None,)\n"
        "class Trainer: ...\n"
    )
    (tmp_path / "star.py").write_text("from pack.deep.model import *\n")
    (tmp_path / "torn.py").write_text("def train(run:\n")
    (tmp_path / "odd.py").write_bytes(b"\x00")
    (tmp_path / "deep.py").write_text("-" * 100_000 + "1")
    return tmp_path


@pytest.mark.parametrize(
    "entry",
    [
        "pack.deep.model:train",
        "pack.deep.model:other",
        "pack.deep.model:made",
        "pack.deep.model:Trainer",
        "pack/deep/model.py:train",
        "star:anything",
    ],
)
def test_what_is_there_is_found_wherever_it_is_defined(folder: Path, entry: str) -> None:
    assert check_entry(entry, folder, JOB) == ()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("pack.deep.modle:train", "has no module 'pack.deep.modle'"),
        ("pack.deep.model:run", "has no function 'run'"),
        ("torn:train", "torn.py, line 1"),
        ("odd:train", "odd.py: source code"),
        ("missing.py:train", "there is no file"),
    ],
)
def test_what_is_certainly_wrong_is_an_error(folder: Path, entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.yaml: entry: ") as caught:
        check_entry(entry, folder, JOB)
    assert message in str(caught.value)


@pytest.mark.parametrize("entry", ["installed_on_the_nodes.only:train", "deep:train"])
def test_what_may_be_right_elsewhere_is_a_doubt(folder: Path, entry: str) -> None:
    doubts = check_entry(entry, folder, JOB)
    assert len(doubts) == 1
    assert doubts[0].startswith("entry: ")


def test_a_module_of_this_interpreter_is_found(folder: Path) -> None:
    assert check_entry("json.decoder:JSONDecoder", folder, JOB) == ()


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "f.py").write_text(
        "def alone(run): ...\n"
        "def some(run, max_steps, lr=0.1, *, seed=0): ...\n"
        "def strict(run, *, width): ...\n"
        "def anything(run, **more): ...\n"
        "@decorated\ndef unknown(run): ...\n"
        "if True:\n    def twice(run): ...\nelse:\n    def twice(run, x): ...\n"
        "def old(steps): ...\n"
        "def older(steps, lr): ...\n"
        "def none(): ...\n"
        "def whatever(*words): ...\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("alone", ["max_steps"]),  # which finds them in run.args
        ("some", ["max_steps", "seed"]),
        ("strict", ["width"]),
        ("anything", ["max_steps"]),
        ("unknown", ["max_steps"]),
        ("twice", ["y"]),
        ("whatever", ["max_steps"]),
    ],
)
def test_arguments_that_the_function_takes(functions: Path, function: str, args: list[str]) -> None:
    assert check_entry(f"f.py:{function}", functions, JOB, args) == ()


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("some", ["maxsteps"], "has no parameter 'maxsteps' (did you mean \"max_steps\"?)"),
        ("some", ["lr"], "parameter 'max_steps' is not given"),
        ("strict", [], "parameter 'width' is not given"),
        ("old", ["steps"], "first parameter is the run, and 'steps' is given as well"),
        ("older", ["steps", "lr"], "first parameter is the run, and 'steps' is given as well"),
        ("none", [], "takes nothing by position"),
    ],
)
def test_arguments_that_would_fail_on_every_rank_are_an_error_now(
    functions: Path, function: str, args: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_entry(f"f.py:{function}", functions, JOB, args)
    assert message in str(caught.value)
    assert "run.args" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "defaults"),
    [("some", {"lr": 0.1, "seed": 0}), ("alone", {}), ("unknown", {}), ("missing", {})],
)
def test_the_defaults_that_the_source_shows(
    functions: Path, function: str, defaults: dict[str, object]
) -> None:
    with (functions / "f.py").open("a") as file:
        file.write("def computed(run, steps=2 * 100, lr=BASE, *, more=None): ...\n")
    assert default_arguments(f"f.py:{function}", functions) == defaults
    assert default_arguments("f.py:computed", functions) == {"more": None}
    assert default_arguments("gone.py:f", functions) == default_arguments("gone:f", functions) == {}


def _old(steps: int) -> None: ...


def _none() -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (_old, ["steps"], "first parameter is the run, and 'steps' is given as well"),
        (_none, [], "takes nothing by position"),
    ],
)
def test_a_function_that_knows_no_run_is_told_before_it_is_submitted(
    function: Callable[..., None], args: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        require_arguments(function, args)
    assert message in str(caught.value)
    assert f"def {function.__name__}(run, …)" in caught.value.next_step


def test_whatever_takes_anything_is_left_alone() -> None:
    require_arguments(lambda *words, **more: None, ["steps"])
    require_arguments(min, ["steps"])  # written in C
