"""A copy of the code: what is in it, that it stays, and that nothing beside it is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurm_forge.errors import ConfigError, SnapshotError
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.code_version import with_new_code
from slurm_forge.launch.submit.submission import create_run, run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.source import snapshot as snapshots
from slurm_forge.source.snapshot import Content, Selection, content_of, take_snapshot
from slurm_forge.source.work_tree import WorkTree
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.run_file import RunFile, read_run_file

PATH = {"PATH": os.environ["PATH"]}
LARGE = 1 << 40


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "pkg").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "train.py").write_text("lr = 1\n")
    (folder / "pkg" / "model.py").write_text("width = 8\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / ".gitignore").write_text("data/\n__pycache__/\n*.bin\n")
    (folder / "data" / "train.txt").write_text("samples")
    (folder / "pkg" / "weights.bin").write_text("weights")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def selection(folder: Path, keep_out: Path | None = None, **options: Any) -> Selection:
    given = {"exclude": (), "max_size": LARGE, **options}
    return Selection(keep_out=keep_out or folder.parent / "runs", **given)


def contents(folder: Path, keep_out: Path | None = None, **options: Any) -> Content:
    tree = WorkTree.around(folder, PATH)
    assert tree is not None
    return content_of(tree, selection(folder, keep_out, **options))


def copied(folder: Path, pool: Path, **options: Any) -> Path:
    tree = WorkTree.around(folder, PATH)
    assert tree is not None
    return pool / take_snapshot(tree, selection(folder, **options), pool)[0]


def test_what_is_tracked_or_new_is_copied_and_the_rest_is_linked(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "train.py").write_text("lr = 2\n")
    (repository / "pkg" / "new.py").write_text("depth = 2\n")
    (repository / "pkg" / "__pycache__").mkdir()
    (repository / "pkg" / "__pycache__" / "x.pyc").write_text("")
    found = contents(repository)
    assert found.files == (".gitignore", "pkg/model.py", "pkg/new.py", "run.sh", "train.py")
    assert found.links == ("data", "pkg/weights.bin")
    place = copied(repository, tmp_path / "pool")
    (repository / "train.py").write_text("lr = 3\n")
    (repository / "data" / "more.txt").write_text("later")
    assert (place / "train.py").read_text() == "lr = 2\n"
    assert (place / "data" / "more.txt").read_text() == "later", "data is where it was"
    assert (place / "pkg" / "weights.bin").read_text() == "weights"
    assert os.access(place / "run.sh", os.X_OK)
    assert place.stat().st_mode & 0o777 == 0o700


def test_the_same_content_is_copied_once(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = copied(repository, tmp_path / "pool")
    git(repository, "commit", "--allow-empty", "-qm", "another")
    monkeypatch.setattr(snapshots, "_copy", lambda *_: pytest.fail("copied again"))
    assert copied(repository, tmp_path / "pool") == first
    assert list((tmp_path / "pool").iterdir()) == [first]


@pytest.mark.parametrize(
    "change",
    [
        lambda f: (f / "train.py").write_text("lr = 9\n"),
        lambda f: (f / "train.py").unlink(),
        lambda f: (f / "pkg" / "x.py").write_text(""),
        lambda f: (f / "train.py").chmod(0o755),
        lambda f: (f / "train.py").rename(f / "trains.py"),
    ],
)
def test_any_change_is_another_content(repository: Path, tmp_path: Path, change: object) -> None:
    before = copied(repository, tmp_path / "pool")
    change(repository)  # type: ignore[operator]
    assert copied(repository, tmp_path / "pool") != before


def test_what_is_excluded_or_large_is_linked(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "assets" / "deep").mkdir(parents=True)
    for name in ("a.png", "deep/b.png"):
        (repository / "assets" / name).write_text(name)
    assert contents(repository, exclude=("assets/",)).links == ("assets", "data", "pkg/weights.bin")
    assert "assets/deep/b.png" in contents(repository, exclude=("*.png",)).links
    monkeypatch.setattr(snapshots, "_LARGEST_FILE", 9)
    assert "pkg/model.py" in contents(repository).links
    place = copied(repository, tmp_path / "pool", exclude=("assets",))
    assert (place / "assets" / "deep" / "b.png").read_text() == "deep/b.png"


def test_too_much_code_is_refused_with_its_largest_folders(repository: Path) -> None:
    with pytest.raises(SnapshotError, match=r"most of it in \.gitignore") as caught:
        contents(repository, max_size=20)
    assert "code: live" in caught.value.next_step


def test_a_file_whose_name_is_no_text_is_refused(repository: Path) -> None:
    (repository / os.fsdecode(b"\xff.py")).write_text("")
    with pytest.raises(SnapshotError, match="is not UTF-8"):
        contents(repository)
    (repository / ".gitignore").write_text("*\n")
    assert "train.py" in contents(repository).files


def test_runs_in_the_work_tree_are_neither_copied_nor_linked(repository: Path) -> None:
    (repository / "runs" / "x").mkdir(parents=True)
    (repository / "runs" / "x" / "run.yaml").write_text("")
    found = contents(repository, keep_out=repository / "runs")
    assert not [path for path in (*found.files, *found.links) if path.startswith("runs")]
    (repository / ".gitignore").write_text("out/\n")
    (repository / "out").mkdir()
    assert "out" not in contents(repository, keep_out=repository / "out" / "runs").links


def test_other_runs_in_the_work_tree_are_left_out_however_they_are_ignored(
    repository: Path,
) -> None:
    before = contents(repository)
    for run in ("tried/one", "two"):
        for name in ("run.yaml", "journal/1-rank0.jsonl", "checkpoints/step-1/rank-0.data"):
            (repository / run / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / run / name).write_text("")
    (repository / "tried" / ".code" / "1a2b").mkdir(parents=True)
    (repository / "tried" / ".code" / "1a2b" / "train.py").write_text("lr = 1\n")
    (repository / "tried" / ".learned").mkdir()
    (repository / "tried" / ".learned" / "saves-1.json").write_text("{}")
    (repository / "tried" / "notes.py").write_text("")
    (repository / "run.yaml").write_text("")
    found = contents(repository)
    assert set(found.files) - set(before.files) == {"tried/notes.py", "run.yaml"}
    assert found.links == before.links
    with (repository / ".gitignore").open("a") as ignored:
        ignored.write("*.jsonl\nrun.yaml\n")
    found = contents(repository)
    assert not [
        path for path in (*found.files, *found.links) if path.startswith(("two", "tried/o"))
    ]


@pytest.mark.parametrize("runs", [".", ".."])
def test_the_work_tree_may_lie_in_the_folder_of_runs(repository: Path, runs: str) -> None:
    before = contents(repository)
    for run, name in (("one", "run.yaml"), (".code/1a2b", "train.py"), (".learned", "a.json")):
        (repository / runs / run).mkdir(parents=True)
        (repository / runs / run / name).write_text("")
    (repository / runs / "one" / "journal").mkdir()
    assert "train.py" in before.files
    assert contents(repository, keep_out=(repository / runs).resolve()) == before


def test_a_file_that_vanishes_meanwhile_is_left_out(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = shutil.copy2
    (repository / "step.tmp").write_text("")

    def vanishes(source: Path, target: Path, **options: bool) -> None:
        (repository / "step.tmp").unlink(missing_ok=True)
        copies(source, target, **options)

    monkeypatch.setattr(shutil, "copy2", vanishes)
    place = copied(repository, tmp_path / "pool")
    assert (place / "train.py").is_file()
    assert not (place / "step.tmp").exists()


@pytest.mark.parametrize("how", ["grows", "comes and goes"])
def test_what_never_rests_is_named(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    copies = shutil.copy2
    log = repository / "pkg" / "train.log"
    log.write_text("")

    def changing(source: Path, target: Path, **options: bool) -> None:
        if how == "grows":
            log.write_text(log.read_text() + "x")
        else:
            log.unlink(missing_ok=True)
        copies(source, target, **options)

    def listed(tree: WorkTree) -> list[str]:
        log.touch()
        return [".gitignore", "pkg/train.log", "train.py"]

    monkeypatch.setattr(shutil, "copy2", changing)
    monkeypatch.setattr(WorkTree, "files", listed)
    with pytest.raises(SnapshotError, match=r"while they are copied: pkg/train\.log") as caught:
        copied(repository, tmp_path / "pool")
    assert "exclude" in caught.value.next_step
    assert list((tmp_path / "pool").iterdir()) == []


def test_links_that_leave_the_work_tree_keep_their_target(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("far away")
    (repository / "near.py").symlink_to("train.py")
    (repository / "far.txt").symlink_to("../elsewhere")
    assert contents(repository).outside == ("far.txt -> ../elsewhere",)
    place = copied(repository, tmp_path / "pool")
    (repository / "train.py").write_text("lr = 5\n")
    assert (place / "near.py").read_text() == "lr = 1\n"
    assert (place / "far.txt").read_text() == "far away"


def test_submodules_are_code_too(repository: Path, tmp_path: Path) -> None:
    inner = repository / "third"
    inner.mkdir()
    (inner / "lib.py").write_text("x = 1\n")
    git(inner, "init", "-q")
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "lib")
    git(repository, "add", "third")
    assert "third/lib.py" in contents(repository).files


def submitted(
    repository: Path, *, queued: bool = True, **keys: object
) -> tuple[RunDirectory, RunFile]:
    job = job_from_mapping({"name": "run", "entry": "train.py:train", **keys})
    return create_run(
        job,
        runs=repository.parent / "runs",
        site=find_site("generic"),
        submitted_from=repository,
        queued=queued,
    )


def test_a_queued_run_keeps_its_code_and_another_does_not(repository: Path, tmp_path: Path) -> None:
    run, file = submitted(repository)
    assert file.code is not None
    assert (run.code_pool / file.code.digest / "train.py").read_text() == "lr = 1\n"
    assert str(file.code).startswith(file.code.commit[:10])
    assert read_run_file(run.spec_file) == file
    assert submitted(repository, name="live", code="live")[1].code is None
    assert submitted(repository, name="here", queued=False)[1].code is None
    assert submitted(repository, name="kept", queued=False, code="snapshot")[1].code is not None


def test_without_git_the_files_are_used_as_they_are_unless_a_snapshot_is_demanded(
    tmp_path: Path,
) -> None:
    assert submitted(tmp_path)[1].code is None
    with pytest.raises(SnapshotError, match="in no git work tree of yours"):
        submitted(tmp_path, name="other", code="snapshot")
    assert not (tmp_path.parent / "runs" / "other").exists()


def test_what_can_not_be_copied_is_told(repository: Path) -> None:
    said: list[str] = []
    job = job_from_mapping({"name": "run", "entry": "train.py:train", "code": {"max_size": "1K"}})
    (repository / "more.py").write_text("#" * 2000)
    run, file = create_run(
        job,
        runs=repository.parent / "runs",
        site=find_site("generic"),
        submitted_from=repository,
        say=said.append,
    )
    assert file.code is None
    assert "larger than 1K" in said[0]
    assert run_state(run).job == ""


def test_links_out_of_the_work_tree_are_told(repository: Path) -> None:
    for name in ("far.py", "farther.py"):
        (repository / name).symlink_to("/elsewhere")
    said: list[str] = []
    create_run(
        job_from_mapping({"name": "run", "entry": "train.py:train"}),
        runs=repository.parent / "runs",
        site=find_site("generic"),
        submitted_from=repository,
        say=said.append,
    )
    assert len(said) == 1
    assert "2 links lead out" in said[0]
    assert "far.py -> /elsewhere and 1 more" in said[0]


def test_new_code_is_taken_on_request_and_unused_snapshots_go(repository: Path) -> None:
    run, file = submitted(repository)
    (repository / "train.py").write_text("lr = 7\n")
    (repository / "pkg" / "model.py").unlink()
    (repository / "pkg" / "other.py").write_text("")
    renewed, choice = with_new_code(run, file)
    assert choice.changed == ("pkg/model.py", "pkg/other.py", "train.py")
    assert renewed.code is not None
    assert renewed.code != file.code
    run.spec_file.write_text(renewed.to_yaml())
    (repository / "train.py").write_text("lr = 8\n")
    again, _ = with_new_code(run, renewed)
    assert file.code is not None
    assert again.code is not None
    digests = {file.code.digest, renewed.code.digest, again.code.digest}
    assert {path.name for path in run.code_pool.iterdir()} == digests, "none is an hour old"
    for path in run.code_pool.iterdir():
        os.utime(path, (0, 0))
    with_new_code(run, renewed)
    digests.remove(file.code.digest)
    assert {path.name for path in run.code_pool.iterdir()} == digests
    live = submitted(repository, name="live", code="live")
    with pytest.raises(SnapshotError, match="no other code"):
        with_new_code(*live)


def test_a_command_has_no_snapshot() -> None:
    with pytest.raises(ConfigError, match="code: a command runs the files in its folder"):
        job_from_mapping({"name": "run", "command": ["python", "x.py"], "code": "snapshot"})
