from __future__ import annotations

import contextlib
import hashlib
import json
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import CheckpointRejectedError
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import BLOCK_SIZE, INDEX_NAME, FileEntry, Manifest, plain_name

hexes = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def files(draw):
    result = {INDEX_NAME} | draw(st.sets(st.from_regex(r"rank-[0-9]{5}\.data", fullmatch=True)))
    return tuple(
        FileEntry(name, size := draw(st.integers(0, 3 * BLOCK_SIZE)),
                  tuple(draw(hexes) for _ in range(-(-size // BLOCK_SIZE))))
        for name in sorted(result)
    )  # fmt: skip


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
names = st.builds(
    CheckpointName,
    st.integers(0, 10**9),
    st.integers(0, 99),
    st.integers(0, 99),
    st.text("0123456789abcdef", min_size=8, max_size=8),
)
manifests = st.builds(
    Manifest,
    run_id=st.text(max_size=20),
    name=names,
    sequence=st.integers(0, 1000),
    world_size=st.integers(1, 4096),
    files=files(),
    state=st.dictionaries(st.text(), json_values, max_size=3),
    torch_version=st.just("2.13.0"),
    created_at=st.datetimes(timezones=st.just(timezone.utc)),
    reason=st.text(max_size=20),
    parent=st.none() | names,
)


def example(**changes) -> Manifest:
    facts = {
        "run_id": "run",
        "name": CheckpointName(12, 1, 1, "0123abcd"),
        "sequence": 1,
        "world_size": 2,
        "files": (FileEntry(INDEX_NAME, 5, ("0" * 32,)), FileEntry("rank-00000.data", 0, ())),
        "state": {"extra": {}},
        "torch_version": "2.13.0",
        "created_at": datetime(2026, 1, 1, tzinfo=timezone.utc),
        "reason": "periodic",
    }
    return Manifest(**(facts | changes))


def rewritten(change) -> bytes:
    """A manifest whose body was changed and whose checksum is right again."""
    body = json.loads(example().to_bytes())["body"]
    change(body)
    text = json.dumps(body, separators=(",", ":")).encode()
    return b'{"body":%s,"sha256":"%s"}' % (text, hashlib.sha256(text).hexdigest().encode())


@given(manifests)
def test_bytes_and_back(manifest):
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@given(manifests, st.data())
def test_no_flipped_bit_passes(manifest, data):
    text = bytearray(manifest.to_bytes())
    position = data.draw(st.integers(0, len(text) - 2))  # the last one is a newline
    text[position] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(CheckpointRejectedError):
        # White space that JSON does not look at may change; nothing that is said may.
        assert Manifest.from_bytes(bytes(text)) == manifest


@given(st.integers(0, 400))
def test_no_torn_manifest_passes(length):
    data = example().to_bytes()
    if length < len(data) - 1:
        with pytest.raises(CheckpointRejectedError):
            Manifest.from_bytes(data[:length])


@given(st.binary(max_size=200))
def test_junk_is_rejected(data):
    with pytest.raises(CheckpointRejectedError):
        Manifest.from_bytes(data)


def test_an_honest_rewrite_is_read():
    assert Manifest.from_bytes(rewritten(lambda body: None)) == example()


@pytest.mark.parametrize("name", [
    "../x", "..", ".", "/etc/passwd", "a/b", "", "a\0b", "a\nb", "manifest.json", ".hidden", "-rf",
    ".metadata", "x" * 300, "a..b", "~", "\u2024\u2024",
])  # fmt: skip
def test_names_that_are_not_plain(name):
    assert not plain_name(name)
    with pytest.raises(CheckpointRejectedError, match="plain file name"):
        Manifest.from_bytes(rewritten(lambda body: body["files"][1].update(name=name)))


@pytest.mark.parametrize(("change", "reason"), [
    (lambda b: b.update(step=13), "differ from its name"),
    (lambda b: b.update(nonce="0" * 8), "differ from its name"),
    (lambda b: b.update(name="step-12"), "not a checkpoint name"),
    (lambda b: b.update(format="two"), "not the version of a format"),
    (lambda b: b.update(more=1), "expected the keys"),
    (lambda b: b.pop("parent"), "expected the keys"),
    (lambda b: b.update(world_size=0), "world_size"),
    (lambda b: b.update(world_size=True), "world_size"),
    (lambda b: b.update(world_size=2.0), "world_size"),
    (lambda b: b.update(block_size=1), "block_size"),
    (lambda b: b.update(state=[]), "state"),
    (lambda b: b.update(created_at="yesterday"), "created_at"),
    (lambda b: b.update(created_at="2026-01-01T00:00:00"), "time zone"),
    (lambda b: b["files"].append(b["files"][0]), "listed twice"),
    (lambda b: b["files"].pop(0), "index.json is not listed"),
    (lambda b: b["files"][0].update(size=-1), "files.size"),
    (lambda b: b["files"][0].update(size=10**20), "files.size"),
    (lambda b: b["files"][0].update(block_hashes=[]), "0 hashes for 5 bytes"),
    (lambda b: b["files"][0].update(block_hashes=["x"]), "block_hashes"),
    (lambda b: b.update(files=None), "files"),
])  # fmt: skip
def test_a_manifest_that_says_something_impossible(change, reason):
    with pytest.raises(CheckpointRejectedError) as caught:
        Manifest.from_bytes(rewritten(change))
    assert reason in caught.value.reason


@pytest.mark.parametrize("data", [
    b'{"body":{},"body":{},"sha256":""}',
    b'{"body":{"a":NaN},"sha256":""}',
    b'{"body":{"a":1e999},"sha256":""}',
    b"[" * 100_000,
    b'{"body":' + b"9" * 10_000 + b',"sha256":""}',
])  # fmt: skip
def test_json_that_is_a_trap(data):
    with pytest.raises(CheckpointRejectedError):
        Manifest.from_bytes(data)
