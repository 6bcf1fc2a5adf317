"""Folders as sites share them: who may read a run, who may write what decides it.

Of all files that are trusted the same is asked, from other user ids: docs/explanation/security.md.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import slurm_forge.cli
from slurm_forge.cli.main import application
from slurm_forge.documents import read
from slurm_forge.errors import CheckpointRejectedError, RunDirectoryError, UnsafeFileError
from slurm_forge.files import make_private_directory
from slurm_forge.journal import fold, read_journal
from slurm_forge.knobs import Knobs
from slurm_forge.launch.attempt.attempt import begin
from slurm_forge.launch.requeue.reconcile import alone
from slurm_forge.run_directory import RunDirectory, newest_claim
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.entry import check_entry
from slurm_forge.spec.layers import layered_job
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.store.directory import CheckpointStore
from tests.security.bounded import as_user
from tests.security.runs import live, snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as several users")

#: None of them has a name here: each one's group with the same number is private.
OWNER, COLLEAGUE, PROJECT = 41001, 41002, 41100
ROOT = 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user can reach: pytest's own are closed to others."""
    made = Path(tempfile.mkdtemp(prefix="forge-shared-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def give(path: Path, owner: int, group: int | None = None) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, owner, owner if group is None else group)


@pytest.fixture
def run(folder: Path) -> RunDirectory:
    """A whole run of OWNER's, which everybody may read."""
    run = RunDirectory.at(folder / "runs" / "run")
    job = job_from_mapping({"name": "run", "entry": "train.py:train"})
    (folder / "train.py").write_text("def train(run):\n    pass\n")
    live(run, spec=RunFile(submitted_from=str(folder), python="python3", job=job).to_yaml())
    run.done_file.unlink()
    give(folder, OWNER)
    for each in (run.path.parent, *run.path.parent.rglob("*")):
        each.chmod(0o755 if each.is_dir() else 0o644)
    return run


def import_everything() -> None:
    """What another user may not be able to read later."""
    for module in pkgutil.walk_packages(slurm_forge.cli.__path__, "slurm_forge.cli."):
        importlib.import_module(module.name)


def types(folder: Path, *words: str) -> tuple[int, str]:
    """The exit status and the output of a command."""
    os.chdir(folder)
    os.environ["HOME"] = str(folder)
    result = CliRunner().invoke(application(), words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


READING = [
    ("status", "run"), ("status",), ("explain", "run"), ("checkpoints", "list", "run"),
    ("checkpoints", "verify", "run"), ("checkpoints", "prune", "run", "--dry-run"),
]  # fmt: skip
CHANGING = [
    ("stop", "run"), ("save", "run"), ("requeue", "run"), ("reconcile", "run"), ("run", "run"),
    ("change", "run", "--set", "seed=2"), ("extend", "run", "--set", "args.n=2"),
    ("fork", "run", "--name", "other"), ("checkpoints", "prune", "run", "--yes"),
    ("checkpoints", "suspect", "run", "latest", "--reason", "x"),
]  # fmt: skip


@pytest.mark.parametrize("who", [COLLEAGUE, ROOT])
def test_whoever_can_read_a_run_reads_it_and_only_its_owner_changes_it(
    folder: Path, run: RunDirectory, who: int
) -> None:
    import_everything()
    with pytest.MonkeyPatch.context() as patch:  # undone, as it isn't by a process that ends
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        for words in (*READING, *CHANGING):
            types(folder, *words)  # as root, which imports what they need
    before = snapshot(folder / "runs")
    for words in READING:
        status, said = as_user(who, functools.partial(types, folder, *words))
        assert status == 0, (words, said)
        assert "belongs to" not in said and "can't be read" not in said, (words, said)
    for words in CHANGING:
        status, said = as_user(who, functools.partial(types, folder, *words))
        assert status == 2, (words, said)
        assert "only its owner starts, stops or changes a run" in " ".join(said.split()), words
    started = functools.partial(begin, run, job="1", restart_count=0, nodes=("n1",), via="test")
    assert as_user(who, started) is RunDirectoryError
    assert snapshot(folder / "runs") == before


def brings_back(run: RunDirectory) -> None:
    with alone(run):
        raise AssertionError("it may be submitted")


def test_a_colleague_brings_no_run_back_whose_folder_of_submissions_is_theirs(
    run: RunDirectory,
) -> None:
    """One who watches runs that are not theirs would have its batch script executed."""
    run.submissions.mkdir(exist_ok=True)
    os.chown(run.submissions, COLLEAGUE, COLLEAGUE)
    assert as_user(COLLEAGUE, functools.partial(brings_back, run)) is RunDirectoryError


def test_a_folder_of_a_run_that_another_user_has_put_there_starts_nothing(
    folder: Path, run: RunDirectory
) -> None:
    """In a run that is shared with a group its members can replace folders."""
    for name in ("journal", "attempts", "checkpoints", "submissions"):
        os.chown(run.path / name, COLLEAGUE, PROJECT)
        assert as_user(OWNER, run.refuse_others) is RunDirectoryError, name
        assert as_user(OWNER, functools.partial(brings_back, run)) is RunDirectoryError, name
        os.chown(run.path / name, OWNER, OWNER)
    assert as_user(OWNER, run.refuse_others) is None


# -- the rule --------------------------------------------------------------------------------------


def acl_for(path: Path, user: int) -> None:
    """What ``setfacl -m u:USER:rw`` does."""
    none = 0xFFFFFFFF
    entries = [(1, 6, none), (2, 6, user), (4, 4, none), (0x10, 6, none), (0x20, 4, none)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", value)
    except OSError as error:
        pytest.skip(f"no ACLs on this file system: {error}")


def private(path: Path) -> None:
    path.chmod(path.stat().st_mode & 0o111 | 0o660)


def shared(path: Path) -> None:
    private(path)
    os.chown(path, OWNER, PROJECT)


def shared_on_purpose(path: Path) -> None:
    """As ``chgrp PROJECT`` and ``chmod g+ws`` of its folder, with umask 002."""
    shared(path)
    place = path if path.is_dir() else path.parent
    os.chown(place, OWNER, PROJECT)
    place.chmod(0o2775)


def everybody(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


#: What is done to a file, and whether it is believed afterwards.
SITUATIONS: dict[str, tuple[Callable[[Path], None], bool]] = {
    "as it was made": (lambda path: None, True),
    "umask 002 and a private group": (private, True),
    "a group that nobody has shared the folder with": (shared, False),
    "a setgid folder of a project": (shared_on_purpose, True),
    "everybody": (everybody, False),
    "an ACL for another user": (lambda path: acl_for(path, COLLEAGUE), False),
    "root's": (lambda path: os.chown(path, 0, 0), True),
}


def kinds(folder: Path, run: RunDirectory) -> dict[str, tuple[Path, Callable[[], object]]]:
    """Every kind of file that is trusted, and what reads it."""
    for name in ("slurm_forge.yaml", "user.yaml"):
        (folder / name).write_text("seed: 1\n")
    (folder / "job.yaml").write_text("name: other\nentry: train.py:train\n")
    give(folder, OWNER)
    store = CheckpointStore(run.checkpoints, "run")
    newest = store.candidates()[0]
    (journal,) = run.journal.glob("1-rank0-*.jsonl")
    return {
        "project file": (
            folder / "slurm_forge.yaml",
            lambda: layered_job(folder / "job.yaml", Knobs()),
        ),
        "job file": (folder / "job.yaml", lambda: read(folder / "job.yaml")),
        "script": (
            folder / "train.py",
            lambda: check_entry("train.py:train", folder, None),
        ),
        "run.yaml": (run.spec_file, lambda: read_run_file(run.spec_file)),
        "journal": (journal, lambda: fold(read_journal(run)[0])),
        "claim": (run.attempts / "1.json", lambda: newest_claim(run)),
        "manifest": (
            store.path(newest) / "manifest.json",
            lambda: store.verify_manifest(newest),
        ),
        "shard": (
            store.path(newest) / "rank-00000.data",
            lambda: store.verify_manifest(newest),
        ),
        "checkpoint": (store.path(newest), lambda: store.verify_manifest(newest)),
        "run directory": (run.path, lambda: make_private_directory(run.path)),
    }


KINDS = [
    "project file", "job file", "script", "run.yaml", "journal", "claim", "manifest", "shard",
    "checkpoint", "run directory",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_rule_for_every_file_that_is_trusted(
    folder: Path, run: RunDirectory, kind: str
) -> None:
    path, reads = kinds(folder, run)[kind]
    status = path.stat()
    place = path if path.is_dir() else path.parent
    place_mode = place.stat().st_mode
    for name, (change, believed) in SITUATIONS.items():
        if name == "root's" and kind == "run directory":
            continue  # it is not the owner's any more
        change(path)
        answer = as_user(OWNER, lambda: (reads(), None)[1])
        assert (answer is None) is believed, f"{kind}: {name}: {answer}"
        if not believed:
            assert answer in (UnsafeFileError, CheckpointRejectedError)
        if "ACL" in name:
            os.removexattr(path, "system.posix_acl_access")
        os.chown(place, OWNER, OWNER)
        place.chmod(place_mode & 0o777)
        os.chown(path, OWNER, OWNER)
        path.chmod(status.st_mode)


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in ("job file", "script")])
def test_what_is_found_is_never_another_users(folder: Path, run: RunDirectory, kind: str) -> None:
    path, reads = kinds(folder, run)[kind]
    os.chown(path, COLLEAGUE, COLLEAGUE)
    answer = as_user(OWNER, lambda: (reads(), None)[1])
    assert answer in (UnsafeFileError, CheckpointRejectedError)


def test_a_project_file_may_be_a_colleagues_in_a_folder_that_the_group_shares(
    folder: Path, run: RunDirectory
) -> None:
    path, reads = kinds(folder, run)["project file"]
    os.chown(folder, COLLEAGUE, PROJECT)
    folder.chmod(0o2775)
    os.chown(path, COLLEAGUE, PROJECT)
    path.chmod(0o664)
    assert as_user(OWNER, lambda: (reads(), None)[1], groups=[PROJECT]) is None
    assert as_user(OWNER, lambda: (reads(), None)[1]) is UnsafeFileError, "not of the group"
    folder.chmod(0o755)
    answer = as_user(OWNER, lambda: (reads(), None)[1], groups=[PROJECT])
    assert answer is UnsafeFileError, "only the colleague can write it"
