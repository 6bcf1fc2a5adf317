from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from slurm_forge.device.identity import driver_version
from slurm_forge.recovery.fingerprint import Fingerprint, compare
from slurm_forge.slurm.process import Completed, run_command
from slurm_forge.spec.safeguards import EnvironmentSpec
from slurm_forge.training.checkpointing.environment_fingerprint import (
    code_facts,
    collect,
    installed_packages,
    variable_facts,
)

CPU = torch.device("cpu")
PATH = {"PATH": os.environ["PATH"]}


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "sub").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "train.py").write_text("lr = 1\n")
    (folder / "logo.bin").write_bytes(b"\0\1")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def code(folder: Path) -> Mapping[str, str]:
    return code_facts(folder, PATH, run_command).facts


def test_this_very_environment_is_told(tmp_path: Path) -> None:
    found = collect(device=CPU, folder=tmp_path, variables={}).facts
    assert found["torch"] == torch.__version__
    assert found["python"].startswith("3.")
    assert found["gpu"] == "none"
    assert found["packages.numpy"].count(".") == 2
    assert not any(key.startswith(("code", "cuda", "driver")) for key in found)


def test_the_same_environment_is_no_difference(repository: Path) -> None:
    one = collect(device=CPU, folder=repository, variables=PATH)
    two = collect(device=CPU, folder=repository / "sub", variables=PATH)
    assert "code.revision" in one.facts
    assert compare(one, two, EnvironmentSpec()) == ()


def test_it_is_quick_where_git_answers_nothing(tmp_path: Path) -> None:
    def measured() -> float:
        begun = time.perf_counter()
        collect(device=CPU, folder=tmp_path, variables={})
        return time.perf_counter() - begun

    assert min(measured() for _ in range(5)) < 0.05


def test_a_new_revision_and_a_change_on_top_are_told_apart(repository: Path) -> None:
    first = code(repository)
    assert first["code.changes"] == "none"
    (repository / "train.py").write_text("lr = 2\n")
    changed = code(repository)
    assert changed["code.revision"] == first["code.revision"]
    assert changed["code.changes"] != "none"
    (repository / "train.py").write_text("lr = 3\n")
    assert code(repository)["code.changes"] not in ("none", changed["code.changes"])
    git(repository, "commit", "-qam", "second")
    assert code(repository)["code.revision"] != first["code.revision"]


def test_a_changed_binary_file_counts(repository: Path) -> None:
    (repository / "logo.bin").write_bytes(b"\0\2")
    one = code(repository)["code.changes"]
    (repository / "logo.bin").write_bytes(b"\0\3")
    assert code(repository)["code.changes"] not in ("none", one)


def test_looking_changes_nothing_in_the_repository(repository: Path) -> None:
    os.utime(repository / "train.py", (1, 1))
    index = (repository / ".git" / "index").read_bytes()
    code(repository)
    assert (repository / ".git" / "index").read_bytes() == index


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What the program ``evil`` beside it leaves behind."""
    script = tmp_path / "evil"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    script.chmod(0o755)
    return tmp_path / "ran"


def plain_git_runs_it(folder: Path, ran: Path) -> bool:
    """The control: what these tests arm does go off without our care."""
    words = ["git", "diff", "HEAD"]
    subprocess.run(words, cwd=folder, check=False, capture_output=True, stdin=subprocess.DEVNULL)
    found = ran.exists()
    ran.unlink(missing_ok=True)
    return found


@pytest.mark.parametrize(
    ("key", "armed"),
    [
        ("filter.f.clean", True),
        ("filter.f.process", True),
        ("filter.F oo.Bar.clean", True),
        ("filter..clean", True),
        ("filter.f.smudge", False),
        ("core.fsmonitor", True),
        ("diff.external", True),
        ("diff.x.textconv", True),
        ("diff.x.command", True),
        # Not for a diff into a pipe, nor instead of git's own words; and not by us.
        ("core.pager", False),
        ("pager.diff", False),
        ("alias.diff", False),
        ("alias.config", False),
        ("alias.rev-parse", False),
    ],
)
def test_what_a_repository_asks_to_be_run_is_not_run(
    repository: Path, ran: Path, key: str, armed: bool
) -> None:
    script = ran.parent / "evil"
    if key.startswith("alias"):
        script = Path(f"!{script}")
    git(repository, "config", key, str(script))
    driver = "none"
    if key.startswith("filter"):
        driver = key[len("filter.") : key.rindex(".")]
        git(repository, "config", f"filter.{driver}.required", "true")
    lines = f'"*.py" diff=x filter={driver.partition(" ")[0]}\n'
    if " " in driver:  # no attribute can say that; the name is to be turned off all the same
        armed = False
    (repository / ".git" / "info" / "attributes").write_text(lines)
    (repository / "train.py").write_text("lr = 2\n")
    ran.unlink(missing_ok=True)
    assert plain_git_runs_it(repository, ran) == armed
    assert code(repository)["code.changes"] != "none"
    assert not ran.exists()


def test_no_hook_of_a_repository_is_run(repository: Path, ran: Path) -> None:
    git(repository, "config", "core.hooksPath", str(ran.parent / "hooks"))
    for hooks in (ran.parent / "hooks", repository / ".git" / "hooks"):
        hooks.mkdir(exist_ok=True)
        for hook in ("post-index-change", "fsmonitor-watchman", "reference-transaction"):
            (hooks / hook).symlink_to(ran.parent / "evil")
    os.utime(repository / "train.py", (1, 1))
    assert plain_git_runs_it(repository, ran)
    os.utime(repository / "train.py", (2, 2))
    assert code(repository)["code.changes"] == "none"
    assert not ran.exists()


@pytest.mark.parametrize("driver", [b"a=b", b"\xff"])
def test_a_filter_that_cannot_be_turned_off_leaves_the_changes_out(
    repository: Path, ran: Path, driver: bytes
) -> None:
    with (repository / ".git" / "config").open("ab") as config:
        config.write(b'[filter "%s"]\n\tclean = %s\n' % (driver, bytes(ran.parent / "evil")))
    (repository / ".gitattributes").write_bytes(b"*.py filter=%s\n" % driver)
    (repository / "train.py").write_text("lr = 2\n")
    assert plain_git_runs_it(repository, ran)
    assert set(code(repository)) == {"code.revision"}
    assert not ran.exists()


@pytest.mark.parametrize("shown", ["short", "log", "diff"])
def test_a_submodule_runs_nothing_either(
    repository: Path, ran: Path, tmp_path: Path, shown: str
) -> None:
    git(tmp_path, "clone", "-q", str(repository), "other")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q",
        str(tmp_path / "other"), "part")  # fmt: skip
    git(repository, "commit", "-qm", "with a part")
    part = repository / "part"
    assert code(repository)["code.changes"] == "none"
    inside = repository / ".git" / "modules" / "part"
    for key in ("filter.f.clean", "filter.f.process", "core.fsmonitor", "diff.external"):
        git(part, "config", key, str(ran.parent / "evil"))
    (inside / "info").mkdir(exist_ok=True)
    (inside / "info" / "attributes").write_text("* filter=f\n")
    git(repository, "config", "diff.submodule", shown)
    git(repository, "config", "diff.ignoreSubmodules", "none")
    (part / "train.py").write_text("lr = 2\n")
    ran.unlink(missing_ok=True)
    assert plain_git_runs_it(repository, ran)
    assert code(repository)["code.changes"] == "none"
    assert not ran.exists()
    git(part, "-c", "filter.f.clean=", "-c", "filter.f.process=", "-c", "core.fsmonitor=false",
        "commit", "-qam", "part")  # fmt: skip
    (part / "train.py").write_text("lr = 3\n")
    ran.unlink(missing_ok=True)
    assert code(repository)["code.changes"] != "none"  # another revision of the part
    assert not ran.exists()


@pytest.mark.parametrize("unknown", ["", "GIT_NO_LAZY_FETCH"])
@pytest.mark.parametrize("url", ["ssh://host/x", "git://host/x", "ext::{evil}", "{other}"])
def test_nothing_is_fetched_for_what_a_repository_lacks(
    repository: Path, ran: Path, tmp_path: Path, url: str, unknown: str
) -> None:
    """Also with an old git, which does not know the word for it."""
    evil = ran.parent / "evil"
    git(tmp_path, "clone", "-q", "--bare", str(repository), "other")
    for key, value in {
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": url.format(evil=evil, other=tmp_path / "other"),
        "remote.origin.uploadpack": str(evil),
        "core.repositoryFormatVersion": "1",
        "core.sshCommand": str(evil),
        "core.gitProxy": str(evil),
        "protocol.allow": "always",
    }.items():
        git(repository, "config", key, value)
    (repository / "train.py").write_text("lr = 2\n")
    blob = subprocess.run(["git", "rev-parse", "HEAD:train.py"], cwd=repository, check=True,
                          capture_output=True, text=True).stdout.strip()  # fmt: skip
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    assert plain_git_runs_it(repository, ran)

    def run(argv: Sequence[str], within: timedelta, variables: Mapping[str, str]) -> Completed:
        return run_command(argv, within, {k: v for k, v in variables.items() if k != unknown})

    assert set(code_facts(repository, PATH, run).facts) == {"code.revision"}
    assert not ran.exists()


def test_the_program_itself_counts_also_where_git_does_not_track_it(
    repository: Path, tmp_path: Path
) -> None:
    program = repository / "new.py"
    program.write_text("lr = 1\n")
    one = collect(device=CPU, folder=repository, variables=PATH, program=program)
    program.write_text("lr = 2\n")
    two = collect(device=CPU, folder=repository, variables=PATH, program=program)
    assert [each.key for each in compare(one, two, EnvironmentSpec())] == ["code.program"]
    elsewhere = code_facts(tmp_path, PATH, run_command, program).facts
    assert set(elsewhere) == {"code.program"}
    assert code_facts(tmp_path, PATH, run_command, tmp_path / "gone.py") == Fingerprint()


def test_run_directories_that_were_committed_are_no_changes_of_the_code(repository: Path) -> None:
    run = repository / "sub" / "sums"
    (run / "journal").mkdir(parents=True)
    for name in ("run.yaml", "journal/rank0.jsonl"):
        (run / name).write_text("{}")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "all")
    (run / "journal" / "rank0.jsonl").write_text("{}{}")
    assert code(repository)["code.changes"] == "none"
    (repository / "train.py").write_text("lr = 2\n")
    assert code(repository)["code.changes"] != "none"


@pytest.mark.parametrize("returncode", [None, 2, 128])
def test_without_knowing_the_filters_nothing_is_compared(
    repository: Path, returncode: int | None
) -> None:
    def run(argv: Sequence[str], within: timedelta, variables: Mapping[str, str]) -> Completed:
        if "config" in argv:
            return Completed(tuple(argv), returncode, "", "")
        return run_command(argv, within, variables)

    assert set(code_facts(repository, PATH, run).facts) == {"code.revision"}


def test_a_repository_of_somebody_else_is_not_touched(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert code(repository) == {}


def test_a_linked_repository_is_not_touched(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".git").symlink_to(repository / ".git")
    assert code(tmp_path / "mine") == {}


def test_no_git_and_a_git_that_hangs_leave_the_facts_out(repository: Path) -> None:
    def missing(argv: Sequence[str], within: timedelta, variables: Mapping[str, str]) -> Completed:
        raise FileNotFoundError("git")

    def hangs(argv: Sequence[str], within: timedelta, variables: Mapping[str, str]) -> Completed:
        assert within <= timedelta(seconds=5)
        return Completed(tuple(argv), None, "0" * 40, "")

    assert code_facts(repository, PATH, missing) == code_facts(repository, PATH, hangs)
    assert code_facts(repository, PATH, missing) == Fingerprint()


def test_git_sees_no_variable_of_ours(repository: Path) -> None:
    seen: list[Mapping[str, str]] = []

    def look(argv: Sequence[str], within: timedelta, variables: Mapping[str, str]) -> Completed:
        seen.append(variables)
        return run_command(argv, within, variables)

    code_facts(repository, {**PATH, "GIT_DIR": "/nowhere", "TOKEN": "x"}, look)
    assert seen
    assert all("TOKEN" not in each and "GIT_DIR" not in each for each in seen)


def test_only_variables_that_change_results_are_kept() -> None:
    given = {
        "NCCL_ALGO": "Ring",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "WANDB_API_KEY": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "PYTORCH_TOKEN": "secret",
        "NCCL_API_KEY": "secret",
        "HOME": "/home/me",
        "NCCL_DEBUG_FILE": "/tmp/x",
        "NCCL_SOCKET_IFNAME": "ib0",
        "MY_NCCL_ALGO": "x",
    }
    assert variable_facts(given).facts == {
        "variables.NCCL_ALGO": "Ring",
        "variables.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "variables.CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def test_a_variable_that_is_gone_is_a_difference() -> None:
    found = compare(variable_facts({"NCCL_ALGO": "Ring"}), variable_facts({}), EnvironmentSpec())
    assert [str(each) for each in found] == ["variables.NCCL_ALGO: was Ring, is not set"]


def test_packages_are_those_that_python_would_import(tmp_path: Path) -> None:
    for folder, names in {
        "first": ["numpy-2.0.0.dist-info", "Flash_Attn-2.5.8+cu12.dist-info"],
        "second": ["numpy-1.26.4.dist-info", "apex-0.1-py3.10.egg-info", "numpy", "x.dist-info"],
    }.items():
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
    paths = ["", str(tmp_path / "first"), str(tmp_path / "none"), str(tmp_path / "second")]
    assert installed_packages(paths) == {
        "flash-attn": "2.5.8+cu12",
        "numpy": "2.0.0",
        "apex": "0.1",
    }


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC\n"
            "GCC version:  gcc version 11.4.0\n",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build",
            "535.104.05",
        ),
        ("", ""),
    ],
)
def test_the_drivers_version_is_read(text: str, version: str) -> None:
    assert driver_version(text) == version
