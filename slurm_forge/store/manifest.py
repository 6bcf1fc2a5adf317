"""The manifest: the one file that says that a checkpoint is whole, and what belongs to it.

It binds run, step, attempt, launch, nonce, the name and size of every file and a hash of each of
their blocks, so that no mixture of two checkpoints, no torn file and no flipped bit passes.  A
SHA-256 over its own body closes it.  Facts only: text in, value out, and back.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from slurm_forge.errors import CheckpointRejectedError
from slurm_forge.files.trusted_read import load_strictly
from slurm_forge.format_version import FormatVersion, refuse_later
from slurm_forge.store.identity import CheckpointName
from slurm_forge.vocabulary.json_value import Json

MANIFEST_NAME = "manifest.json"
#: Which tensors there are, and where their shards lie.
INDEX_NAME = "index.json"
#: Bytes per hash: small against a shard, large against a hash.
BLOCK_SIZE = 4 << 20
#: Bytes of a manifest that are read at most; hashes of some 30 TiB fit.
MANIFEST_LIMIT = 256 << 20

#: See ``slurm_forge.format_version``; a major version alone, as first versions read it.
_FORMAT = 1
_MOST_FILES = 1_000_000
_LARGEST_FILE = 1 << 50
_HASH = re.compile(r"[0-9a-f]{32}")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")


def rejected(reason: str) -> CheckpointRejectedError:
    """The error for a checkpoint that is not what was written."""
    return CheckpointRejectedError(
        reason, reason=reason, next_step="An older checkpoint is used; check the storage."
    )


def plain_name(name: str) -> bool:
    """Whether ``name`` can only mean a file inside the checkpoint's own directory."""
    return _PLAIN.fullmatch(name) is not None and name != MANIFEST_NAME and ".." not in name


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: its size in bytes and the xxh3_128 of each block, in order."""

    name: str
    size: int
    block_hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a published checkpoint says about itself.

    ``state`` is the part of the training state that is not tensors, as JSON.  ``sequence`` counts
    the saves of the process that wrote it and tells two checkpoints of one step and launch apart.
    ``parent`` is the checkpoint that the run was resumed from or that was written before.
    ``created_at`` is for people; nothing is decided by it.  ``findings`` name what is not healthy
    in it; ``about`` is what it was made with and from (environment, structure, data), to compare.
    """

    run_id: str
    name: CheckpointName
    sequence: int
    world_size: int
    files: tuple[FileEntry, ...]
    state: Mapping[str, Json]
    torch_version: str
    created_at: datetime
    reason: str
    parent: CheckpointName | None = None
    findings: tuple[str, ...] = ()
    about: Mapping[str, Json] = field(default_factory=dict)
    block_size: int = BLOCK_SIZE

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return self.name.step

    @property
    def attempt(self) -> int:
        """The attempt that wrote it."""
        return self.name.attempt

    @property
    def launch(self) -> int:
        """The launch inside the attempt that wrote it."""
        return self.name.launch

    @property
    def nonce(self) -> str:
        """The nonce of its name."""
        return self.name.nonce

    @property
    def size(self) -> int:
        """Bytes of all files together, the manifest not counted."""
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        body = _canonical(self._body())
        digest = hashlib.sha256(body).hexdigest()
        return b'{"body":' + body + b',"sha256":"' + digest.encode("ascii") + b'"}\n'

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read and check a manifest; CheckpointRejectedError with the reason for any doubt."""
        try:
            whole = load_strictly(data.decode("ascii"))
        except (ValueError, RecursionError) as error:
            raise rejected(f"the manifest is damaged: {error}") from error
        body = _dict(whole, "manifest", {"body", "sha256"})
        try:
            digest = hashlib.sha256(_canonical(body["body"])).hexdigest()
        except (ValueError, RecursionError) as error:
            raise rejected(f"the manifest is damaged: {error}") from error
        if digest != body["sha256"]:
            raise rejected("the manifest's own checksum does not match")
        return _read_body(body["body"])

    def _body(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "run_id": self.run_id,
            "name": str(self.name),
            "step": self.step,
            "attempt": self.attempt,
            "launch": self.launch,
            "nonce": self.nonce,
            "sequence": self.sequence,
            "parent": None if self.parent is None else str(self.parent),
            "reason": self.reason,
            "findings": list(self.findings),
            "about": dict(self.about),
            "created_at": self.created_at.isoformat(),
            "torch_version": self.torch_version,
            "world_size": self.world_size,
            "block_size": self.block_size,
            "files": [
                {"name": f.name, "size": f.size, "block_hashes": list(f.block_hashes)}
                for f in self.files
            ],
            "state": dict(self.state),
        }


def _canonical(body: object) -> bytes:
    # In the order it stands in: order is part of a dict that is restored exactly.
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")


def _refuse_later(found: object) -> None:
    try:
        version = FormatVersion.parse(found)
    except ValueError as error:
        raise rejected(str(error)) from error
    refuse_later("the checkpoint", version, FormatVersion(_FORMAT))


def _read_body(value: object) -> Manifest:
    keys = {
        "format", "run_id", "name", "step", "attempt", "launch", "nonce", "sequence", "parent",
        "reason", "findings", "about", "created_at", "torch_version", "world_size", "block_size",
        "files", "state",
    }  # fmt: skip
    if isinstance(value, dict) and (value.get("format") is True or value.get("format") != _FORMAT):
        # Of a later minor version keys that this one does not know are passed over.
        _refuse_later(value.get("format"))
        value = {key: each for key, each in value.items() if key in keys}
    body = _dict(value, "body", keys)
    name = _name(body["name"], "name")
    named_as = (body["step"], body["attempt"], body["launch"], body["nonce"])
    if named_as != (name.step, name.attempt, name.launch, name.nonce):
        raise rejected("step, attempt, launch or nonce differ from its name")
    block_size = _int(body["block_size"], "block_size", 1 << 12, 1 << 30)
    files = tuple(_file(item, block_size) for item in _list(body["files"], "files"))
    if len({file.name for file in files}) != len(files) or len(files) > _MOST_FILES:
        raise rejected("a file is listed twice, or there are too many")
    if INDEX_NAME not in {file.name for file in files}:
        raise rejected(f"{INDEX_NAME} is not listed")
    state = body["state"]
    about = body["about"]
    if not isinstance(state, dict) or not isinstance(about, dict):
        raise rejected("state or about is not an object")
    parent = body["parent"]
    return Manifest(
        run_id=_text(body["run_id"], "run_id"),
        name=name,
        sequence=_int(body["sequence"], "sequence", 0, 1 << 53),
        world_size=_int(body["world_size"], "world_size", 1, 1 << 24),
        files=files,
        state=state,
        torch_version=_text(body["torch_version"], "torch_version"),
        created_at=_time(body["created_at"]),
        reason=_text(body["reason"], "reason"),
        parent=None if parent is None else _name(parent, "parent"),
        findings=tuple(_text(each, "findings") for each in _list(body["findings"], "findings")),
        about=about,
        block_size=block_size,
    )


def _file(value: object, block_size: int) -> FileEntry:
    entry = _dict(value, "files", {"name", "size", "block_hashes"})
    name = _text(entry["name"], "files.name")
    if not plain_name(name):
        raise rejected(f"{name[:80]!r} is not a plain file name")
    size = _int(entry["size"], "files.size", 0, _LARGEST_FILE)
    hashes = tuple(
        _matching(item, "files.block_hashes", _HASH)
        for item in _list(entry["block_hashes"], "files.block_hashes")
    )
    if len(hashes) != -(-size // block_size):
        raise rejected(f"{name}: {len(hashes)} hashes for {size} bytes")
    return FileEntry(name, size, hashes)


def _dict(value: object, where: str, keys: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != keys:
        fields_there = sorted(value)[:20] if isinstance(value, dict) else type(value).__name__
        raise rejected(f"{where}: expected the keys {sorted(keys)}, found {fields_there}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise rejected(f"{where} is not a list")
    return value


def _int(value: object, where: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise rejected(f"{where} is {str(value)[:40]}, not an integer from {least} to {most}")
    return value


def _text(value: object, where: str) -> str:
    if type(value) is not str or len(value) > 10_000:
        raise rejected(f"{where} is not text")
    return value


def _matching(value: object, where: str, pattern: re.Pattern[str]) -> str:
    text = _text(value, where)
    if pattern.fullmatch(text) is None:
        raise rejected(f"{where} is {text[:80]!r}")
    return text


def _name(value: object, where: str) -> CheckpointName:
    try:
        return CheckpointName.parse(_text(value, where))
    except ValueError as error:
        raise rejected(f"{where}: {error}") from error


def _time(value: object) -> datetime:
    try:
        time = datetime.fromisoformat(_text(value, "created_at"))
    except ValueError as error:
        raise rejected(f"created_at: {error}") from error
    if time.tzinfo is None:
        raise rejected("created_at has no time zone")
    return time
