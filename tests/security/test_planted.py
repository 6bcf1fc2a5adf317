"""Names and links that somebody planted lead nowhere; what we make is ours alone.

X04 names that lead out, X05 links at every path we create, X07 modes, X08 submitit's pickles,
X15 directories made by another user, X20 hard links.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
import submitit
import xxhash

from slurm_forge.errors import CheckpointRejectedError, FencedError, UnsafeFileError
from slurm_forge.run_directory import Fence, RunDirectory, newest_claim
from slurm_forge.store.blocks import verify_blocks
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.manifest import plain_name
from tests.security.bounded import NOBODY, as_nobody
from tests.security.runs import live, snapshot, tolerant
from tests.unit.checkpoint.helpers import open_store, save, weights

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as two users")


# X04


OUTSIDE = [
    "../secret", "../../secret", "..", ".", "/etc/passwd", "//etc/passwd", "./index.json", "a/../b",
    "a/b", "a\\b", "..\\secret", "C:\\secret", "~", "~root/x", "$HOME", "%2e%2e/secret", "a\0.data",
    "rank-00000.data/", "rank-00000.data\n", "\n", " rank-00000.data", "-rf", "--", ".hidden",
    ".metadata", "manifest.json", "\u2025/x", "\uff0e\uff0e/x", "rank\u200b.data", "caf\u00e9", "",
    "a" * 202, "a..b", "x/.", "proc/self/mem", "/dev/zero", "\ud800", "*", "{a,b}", "a b", "a;b",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=ascii)
def test_no_name_leads_out_of_a_checkpoint(name):
    assert not plain_name(name)


def reseal(path, change):
    body = json.loads(path.read_bytes())["body"]
    change(body)
    text = json.dumps(body, separators=(",", ":"))
    path.write_text(
        f'{{"body":{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}\n',
        encoding="ascii",
    )


@pytest.mark.parametrize("name", ["../../secret", "{}/secret", "link", "dir/../../../secret"])
def test_a_file_outside_is_not_even_opened(tmp_path, monkeypatch, name):
    """Size and hash are right: only its place is wrong."""
    store = open_store(tmp_path)
    saved = save(store, weights())
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (saved.path / "dir").mkdir()
    (saved.path / "link").symlink_to(secret)
    entry = {
        "name": name.format(tmp_path), "size": 6,
        "block_hashes": [xxhash.xxh3_128_hexdigest(b"secret")],
    }  # fmt: skip
    reseal(saved.path / "manifest.json", lambda body: body["files"].append(entry))
    opened, real = [], os.open

    def watched(path, *args, **options):
        descriptor = real(path, *args, **options)
        opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    with pytest.raises(CheckpointRejectedError):
        store.verify_manifest(saved.name)
    assert any(path.endswith("manifest.json") for path in opened)
    assert not any(path.endswith("secret") for path in opened)


# X05, X20


#: Every path that a run makes, as a link to the victim's file or folder would stand there.
NONCE, NAME = "0" * 8, "step-00000001.a1.l1-00000000"
STAGE = f"checkpoints/.stage-{NAME}"
FOLDERS = [
    "", "journal", "attempts", "checkpoints", "submissions", "attempts/1", STAGE,
    f"checkpoints/{NAME}", f"checkpoints/.trash-{NAME}-{NONCE}",
]  # fmt: skip
FILES = [
    "run.yaml", "DONE", "attempts/1.json", "attempts/local.lock", "attempts/rendezvous-key.json",
    f"journal/1-rank0-{NONCE}.jsonl", f"checkpoints/{NAME}", STAGE,
    *(f".{name}.{NONCE * 2}.tmp" for name in ("run.yaml", "DONE")),
    f"attempts/.1.json.{NONCE * 2}.tmp", f"attempts/.rendezvous-key.json.{NONCE * 2}.tmp",
]  # fmt: skip
IN_A_STAGE = ["rank-00000.data", "index.json", "manifest.json", f".manifest.json.{NONCE * 2}.tmp"]


@pytest.fixture
def known_names(monkeypatch):
    """The attacker knows every name beforehand."""
    monkeypatch.setattr(secrets, "token_hex", lambda n=32: "00" * n)
    monkeypatch.setattr(os, "urandom", bytes)


@pytest.fixture
def victim(tmp_path):
    """Somebody's folder and file, as they are to stay."""
    folder = tmp_path / "victim"
    (folder / "inner").mkdir(parents=True, mode=0o700)
    for path in (folder / "file", folder / "inner" / "file"):
        path.write_bytes(b"precious " * 1000)
        path.chmod(0o600)
    return folder


def put(path: Path, kind: str, victim: Path) -> None:
    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    if kind == "a hard link":
        os.link(victim / "file", path)
    else:
        target = {"a link to a file": "file", "a link to a folder": "inner", "dangling": "new"}
        path.symlink_to(victim / target[kind])


LINKS = ["a link to a file", "a link to a folder", "dangling"]
WHERE = [(path, kind) for path in FOLDERS for kind in LINKS]
WHERE += [(path, kind) for path in FILES for kind in LINKS]
WHERE += [(path, "a hard link") for path in FILES if path != "attempts/local.lock"]


@pytest.mark.usefixtures("known_names")
@pytest.mark.parametrize(("where", "kind"), WHERE)
def test_nothing_is_written_through_what_was_planted(tmp_path, victim, where, kind):
    run = RunDirectory.at(tmp_path / "runs" / "run")
    before = snapshot(victim)
    put(run.path / where if where else run.path, kind, victim)
    error = tolerant(run)
    assert snapshot(victim).keys() == before.keys(), "something was made there"
    assert snapshot(victim) == before, "something was changed there"
    if where in ("", "journal", "attempts", "checkpoints", "submissions", "attempts/1"):
        assert isinstance(error, UnsafeFileError), "a link instead of a folder is refused"


def test_nothing_is_written_into_a_lock_file_with_a_second_name(tmp_path, victim):
    run = RunDirectory.at(tmp_path / "runs" / "run")
    before = snapshot(victim)
    put(run.local_lock, "a hard link", victim)
    tolerant(run)
    assert snapshot(victim) == before


@pytest.mark.usefixtures("known_names")
@pytest.mark.parametrize("kind", [*LINKS, "a hard link"])
@pytest.mark.parametrize("name", IN_A_STAGE)
def test_nor_through_what_stands_in_a_stage(tmp_path, victim, monkeypatch, name, kind):
    real = CheckpointStore.create_stage

    def planted(self, checkpoint):
        stage = real(self, checkpoint)
        put(stage / name, kind, victim)
        return stage

    monkeypatch.setattr(CheckpointStore, "create_stage", planted)
    before = snapshot(victim)
    run = RunDirectory.at(tmp_path / "run")
    assert tolerant(run) is not None, "a save in a stage that is not its own is none"
    assert snapshot(victim) == before
    assert CheckpointStore(run.checkpoints, "run").candidates() == []


def test_what_is_deleted_ends_at_links(tmp_path, victim):
    store = open_store(tmp_path)
    for step in range(4):
        saved = save(store, weights(), step=step)
        (saved.path / "link").symlink_to(victim)
        os.link(victim / "file", saved.path / "hard")
    for name in (f".trash-{saved.name}-00", f".stage-{NAME}"):
        (store.directory / name).symlink_to(victim)
    before = snapshot(victim)
    pruned = store.prune([], lambda: None, current=(9, 9))
    assert len(pruned.removed) == 2
    assert snapshot(victim) == before


def test_a_shard_that_is_a_second_name_of_somebodys_file_is_only_read(tmp_path, victim):
    """And believed only where its bytes are those that were saved."""
    store = open_store(tmp_path)
    saved = save(store, weights())
    shard = saved.path / "rank-00000.data"
    size = shard.stat().st_size
    shard.unlink()
    (victim / "file").write_bytes(b"x" * size)
    os.link(victim / "file", shard)
    before = snapshot(victim)
    with pytest.raises(CheckpointRejectedError):
        (entry,) = (f for f in store.verify_manifest(saved.name).files if f.name == shard.name)
        list(verify_blocks(shard, entry, [0]))
    assert snapshot(victim) == before


# X07


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_we_make_is_ours_alone_whatever_the_umask(tmp_path, umask):
    run = RunDirectory.at(tmp_path / "runs" / "run")
    before = os.umask(umask)
    try:
        live(run)
    finally:
        os.umask(before)
    seen = [run.path.parent, run.path, *run.path.rglob("*")]
    for path in seen:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} {mode:o}"
    assert len(seen) > 15


@pytest.fixture
def open_folder():
    """A folder that every user can reach: pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="forge-two-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def attempts_of_nobody(paths, folders):
    """What another user got done, one by one."""
    done = []
    for path in paths:
        for what, attempt in (
            ("read", lambda p=path: p.open("rb").close()),
            ("write", lambda p=path: p.open("r+b").close()),
            ("delete", lambda p=path: p.unlink()),
            ("rename", lambda p=path: p.rename(p.with_name("taken"))),
            ("open up", lambda p=path: p.chmod(0o777)),
        ):
            try:
                attempt()
            except (PermissionError, IsADirectoryError):
                continue
            done.append((what, str(path)))
    for folder in folders:
        for what, attempt in (
            ("list", lambda f=folder: list(f.iterdir())),
            ("make a file", lambda f=folder: (f / "STOP").touch()),
            ("make a claim", lambda f=folder: (f / "9.json").touch()),
            ("make a link", lambda f=folder: (f / "latest").symlink_to("/")),
            ("make a folder", lambda f=folder: (f / "step-00000099.a9.l9-00000000").mkdir()),
        ):
            try:
                attempt()
            except PermissionError:
                continue
            done.append((what, str(folder)))
    return done


@needs_root
@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_another_user_gets_nothing_done_in_a_run(open_folder, umask):
    run = RunDirectory.at(open_folder / "run")
    before = os.umask(umask)
    try:
        live(run)
    finally:
        os.umask(before)
    everything = list(run.path.rglob("*"))
    paths = [path for path in everything if not path.is_dir()]
    folders = [run.path, *(path for path in everything if path.is_dir())]
    assert len(paths) > 8 and len(folders) > 5
    assert as_nobody(lambda: attempts_of_nobody(paths, folders)) == []
    control = open_folder / "control"
    control.mkdir()
    control.chmod(0o777)
    assert len(as_nobody(lambda: attempts_of_nobody([], [control]))) == 5


# X08


@needs_root
def test_submitits_pickles_can_not_be_swapped_by_another_user(open_folder):
    """Whoever starts the job executes them."""
    before = os.umask(0)
    try:
        executor = submitit.AutoExecutor(open_folder / "logs", cluster="forge")
    finally:
        os.umask(before)
    assert executor is not None
    pickle = open_folder / "logs" / "1_submitted.pkl"
    pickle.write_bytes(b"ours")
    pickle.chmod(0o666)  # as some umasks would have it

    def swap():
        evil = open_folder / "evil"
        evil.write_bytes(b"evil")
        evil.replace(pickle)

    open_folder.chmod(0o777)
    assert as_nobody(swap) is PermissionError
    assert as_nobody(lambda: pickle.write_bytes(b"evil")) is PermissionError
    assert pickle.read_bytes() == b"ours"


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_folder_for_pickles_that_another_user_made_is_refused(open_folder, mode):
    logs = open_folder / "logs"
    logs.mkdir()
    os.chown(logs, NOBODY, NOBODY)
    logs.chmod(mode)
    with pytest.raises(UnsafeFileError, match=str(NOBODY)):
        submitit.AutoExecutor(logs, cluster="forge")


# X15


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
@pytest.mark.parametrize("where", ["", *FOLDERS[1:6]])
def test_a_directory_that_another_user_made_first_is_refused(tmp_path, where, mode):
    run = RunDirectory.at(tmp_path / "run")
    folder = run.path / where if where else run.path
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(mode)
    before = snapshot(folder)
    assert isinstance(tolerant(run), UnsafeFileError)
    assert snapshot(folder) == before, "something was put there"


@needs_root
def test_a_claim_of_another_user_is_not_believed_and_stops_us_rather_than_not(tmp_path):
    run = RunDirectory.at(tmp_path / "run")
    live(run)
    path = run.attempts / "2.json"
    path.write_bytes((run.attempts / "1.json").read_bytes())
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(UnsafeFileError):
        newest_claim(run)
    with pytest.raises(FencedError):
        Fence(run, 1)()
