"""A part of the crash matrix, in half a minute: scripts/crash-matrix runs all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.crash import shim
from tests.crash.disk import Disk, Loss
from tests.crash.shim import Op, Record

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        shim.compiler() is None,
        reason="the crash matrix is LEFT OUT: no C compiler here to build its shim with",
    ),
]


def crash_matrix(tmp_path, *arguments):
    """Exit status, every injection, and what it printed."""
    out = tmp_path / "matrix.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash", "--no-dcp", "--json", str(out), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=350, check=False,
    )  # fmt: skip
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text())["results"], done.stdout + done.stderr


def bad(result):
    return result["wrong"] or result["lost"] or result["blocked"] or result["hang"]


@pytest.mark.parametrize(
    ("sample", "injections", "calls"),
    [(60, 150, 40), pytest.param(140, 250, 80, marks=pytest.mark.slow)],
)
def test_nothing_is_lost_mixed_blocked_or_hung(tmp_path, sample, injections, calls):
    status, results, text = crash_matrix(tmp_path, "--sample", str(sample), "--jobs", "2")
    assert [result for result in results if bad(result)] == [], text
    assert status == 0, text
    struck = Counter(result["kind"] for result in results)
    assert len(results) >= injections, struck
    assert {
        "kill before", "kill after", "torn", "ENOSPC once", "ENOSPC sticky", "EIO once",
        "answer lost",
        *(loss.value for loss in Loss), *(f"after ack: {loss.value}" for loss in Loss),
    } <= set(struck)  # fmt: skip
    assert {result["rank"] for result in results} >= {0, 1}
    assert {result["state"] for result in results} >= {"old", "new"}
    assert any(result["direct_writes"] for result in results), "direct I/O was never tried"
    assert len({(r["path"], r["rank"], r["call"]) for r in results}) > calls


@pytest.mark.parametrize(
    ("sabotage", "kinds"),
    [
        ("no-file-fsync", {"after ack: power loss: data", "after ack: power loss: both"}),
        ("no-folder-fsync", {"after ack: power loss: metadata", "after ack: power loss: both"}),
        ("shards-last", {"power loss: data"}),
    ],
)
def test_a_broken_protocol_is_noticed(tmp_path, sabotage, kinds):
    arguments = ["--path", "save", "--kind", "COUNT", "--kind", "POWER", "--jobs", "2"]
    status, results, text = crash_matrix(tmp_path, "--sabotage", sabotage, *arguments)
    assert status == 1, text
    assert kinds <= {result["kind"] for result in results if bad(result)}, text


def record(op, inode, directory=0, name="", data=b"", length=0, name2=""):
    return Record(op, 0, -1, inode, directory, directory, 0, length, name, name2, data)


def test_what_a_power_loss_leaves():
    """The model itself: a file needs its fsync, and its name that of the folder."""
    made = [record(Op.CREATE, 2, 1, "a"), record(Op.WRITE, 2, data=b"abc", length=3)]
    synced = [record(Op.SYNC, 2)]
    named = [record(Op.SYNC, 1)]
    assert Disk(1, made).tree() == {"a": b"abc"}
    assert Disk(1, made).tree(Loss.DATA) in ({"a": b""}, {"a": bytes(3)})
    assert Disk(1, made).tree(Loss.METADATA) == Disk(1, made + synced).tree(Loss.BOTH) == {}
    assert Disk(1, made + named).tree(Loss.BOTH) == {"a": b""}
    assert Disk(1, made + named).tree(Loss.METADATA) == {"a": b"abc"}
    assert Disk(1, made + synced + named).tree(Loss.BOTH) == {"a": b"abc"}
    moved = [*made, *synced, *named, record(Op.RENAME, 2, 1, "a", name2="b")]
    assert Disk(1, moved).tree(Loss.DATA) == {"b": b"abc"}
    assert Disk(1, moved).tree(Loss.METADATA) == {"a": b"abc"}
    assert Disk(1, moved + named).tree(Loss.METADATA) == {"b": b"abc"}
    # After a failed fsync a later one promises nothing any more.
    failed = [*made, record(Op.SYNC_FAILED, 2), *synced, *named]
    assert Disk(1, failed).tree(Loss.BOTH) == {"a": b""}
