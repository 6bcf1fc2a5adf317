"""Files that grow when they are read: refused at once, and without the memory (X16)."""

from __future__ import annotations

import hashlib
import json

import pytest

from slurm_forge.checkpoint.content.index import Index
from slurm_forge.checkpoint.read.load import resume
from slurm_forge.errors import CheckpointRejectedError, FileTooLargeError
from slurm_forge.run_directory import RunDirectory, newest_claim
from slurm_forge.store.manifest import Manifest
from tests.security.bounded import bounded
from tests.security.runs import live
from tests.unit.checkpoint.helpers import open_store, save, value_of, weights

GIGABYTE = 1 << 30


def sparse(path, size):
    """Large for whoever reads it, nothing on the disk."""
    path.unlink()
    with path.open("wb") as file:
        file.truncate(size)
    path.chmod(0o600)


def resumed(store):
    state, rejected = weights(-1.0), []
    resume(store, state, group=None, on_reject=lambda name, why: rejected.append(name.step))
    return value_of(state), rejected


@pytest.mark.parametrize("file", ["manifest.json", "index.json", "rank-00000.data"])
def test_a_sparse_gigabyte_is_passed_over_unread(tmp_path, file):
    store = open_store(tmp_path)
    save(store, weights(1.0), step=1)
    newest = save(store, weights(2.0), step=2)
    sparse(newest.path / file, GIGABYTE)
    spent = bounded(lambda: resumed(store))
    assert spent.result == (1.0, [2])
    assert spent.megabytes < 100 and spent.seconds < 1.0, spent


def test_a_sparse_gigabyte_instead_of_a_claim(tmp_path):
    run = RunDirectory.at(tmp_path / "run")
    live(run)
    sparse(run.attempts / "1.json", GIGABYTE)
    spent = bounded(lambda: newest_claim(run))
    assert spent.result is FileTooLargeError
    assert spent.megabytes < 100 and spent.seconds < 1.0, spent


def sealed(body):
    return b'{"body":' + body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


MANIFESTS = {
    "deep lists": b"[" * 2_000_000,
    "deep objects": b'{"body":' * 500_000,
    "deep in a value": sealed(b'{"state":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "empty objects": sealed(b"[" + b"{}," * 700_000 + b"{}]"),
    "a long number": sealed(b'{"step":' + b"9" * 5_000_000 + b"}"),
    "a large exponent": sealed(b'{"step":1e999999999}'),
    "a long text": sealed(b'{"run_id":"' + b"a" * 5_000_000 + b'"}'),
    "surrogates": sealed(b'{"run_id":"\\ud800"}'),
    "the same key": b"{" + b'"a":0,' * 500_000 + b'"a":0}',
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_is_a_trap_costs_little(case):
    spent = bounded(lambda: Manifest.from_bytes(MANIFESTS[case]))
    assert spent is not None and spent.result is CheckpointRejectedError
    assert spent.seconds < 2 and spent.megabytes < 200, spent


@pytest.mark.parametrize(("size", "hashes"), [
    (1 << 50, 1), ((1 << 50) + 1, 1), (1 << 62, 1), (1 << 40, 0), (1, 1_000_000), (-1, 0),
])  # fmt: skip
def test_promised_sizes_take_no_memory(tmp_path, size, hashes):
    store = open_store(tmp_path)
    saved = save(store, weights())
    path = saved.path / "manifest.json"
    body = json.loads(path.read_bytes())["body"]
    body["files"][0].update(size=size, block_hashes=["0" * 32] * hashes)
    path.write_bytes(sealed(json.dumps(body, separators=(",", ":")).encode()))
    spent = bounded(lambda: store.verify_manifest(saved.name))
    assert spent.result is CheckpointRejectedError
    assert spent.seconds < 3 and spent.megabytes < 500, spent


def test_an_index_above_its_limit_is_not_read(tmp_path):
    """Its promise and its file agree: three gigabytes of zeros."""
    store = open_store(tmp_path)
    save(store, weights(1.0), step=1)
    newest = save(store, weights(2.0), step=2)
    blocks = 3 * GIGABYTE >> 22
    path = newest.path / "manifest.json"
    body = json.loads(path.read_bytes())["body"]
    body["files"][0].update(size=3 * GIGABYTE, block_hashes=["0" * 32] * blocks)
    path.write_bytes(sealed(json.dumps(body, separators=(",", ":")).encode()))
    sparse(newest.path / "index.json", 3 * GIGABYTE)
    spent = bounded(lambda: resumed(store))
    assert spent.result == (1.0, [2])
    assert spent.megabytes < 100 and spent.seconds < 1.0, spent


@pytest.mark.parametrize("body", [
    {"format": 1, "files": [], "tensors": {"a": ["float32", [1 << 61] * 1000, []]}},
    {"format": 1, "files": [], "tensors": {"a": ["float32", [1 << 40, 1 << 40], []]}},
    {"format": 1, "files": ["x"] * 1_000_000, "tensors": {}},
    {"format": 1, "files": ["f"], "tensors": {"a": ["float32", [4], [[0, 0, [0], [1]]] * 50_000]}},
    {"format": 1, "files": ["f"], "tensors": {
        "a": ["float32", [100_000], [[0, 0, [0], [1]] for _ in range(100_000)]]}},
])  # fmt: skip
def test_an_index_of_huge_counts_costs_little(body):
    data = json.dumps(body).encode()
    spent = bounded(lambda: Index.from_bytes(data, {"f": 1 << 40}))
    assert spent is not None, "it did not end by itself"
    assert spent.result is CheckpointRejectedError
    assert spent.seconds < 3 and spent.megabytes < 300, spent
