"""What can happen to the files of a checkpoint, one thing at a time: values, nothing is written.

A damage is what some files hold afterwards.  The kinds are those of disks and file systems (flipped
bits, lost and misdirected writes, zeroed pages, cut and grown files), of people (swapped, foreign,
deleted and renamed ones) and of programs that write JSON.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

PAGE = 4096
BLOCK = 4 << 20
MANIFEST = "manifest.json"
INDEX = "index.json"

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Damage:
    """Files with what they hold now (None: gone)."""

    kind: str
    what: str
    changes: Mapping[str, bytes | None]


def file_damages(files: Files, older: Files, *, seed: int, flips: int) -> Iterator[Damage]:
    """Damages of any file of any format; ``flips`` bit flips, other kinds in proportion.

    ``older`` are the same files of an older checkpoint, and where stale data come from.
    """
    dice = random.Random(seed)
    some = max(flips // 25, 2)
    names = sorted(files)
    yield from _differing(
        files,
        chain(
            (_flip(files, name, at, bit) for name, at, bit in _bits(files, dice, flips)),
            (_page(files, name, dice, lambda _: bytes(PAGE), "zeroed page")
             for name in names for _ in range(2 * some)),
            (_stale_page(files, older, name, dice) for name in names for _ in range(some)),
            (_swapped_pages(files, name, dice) for name in names for _ in range(some)),
            (Damage("shifted", f"{name} by {n}", {name: bytes(n) + files[name][:-n]})
             for name in names for n in (1, 64, 4096) if n < len(files[name])),
            (Damage("truncated", f"{name} to {n}", {name: files[name][:n]})
             for name in names for n in _lengths(files[name], dice, some)),
            (Damage("extended", f"{name} by {len(more)}", {name: files[name] + more})
             for name in names for more in (b"\0", b"\n", b" ", b"x", bytes(PAGE), bytes(BLOCK))),
            (Damage("foreign", f"{name}: {what}", {name: data})
             for name in names for what, data in _foreign(files[name], dice)),
            (Damage("deleted", name, {name: None}) for name in names),
            [Damage("emptied directory", "", dict.fromkeys(names))],
            (Damage("swapped, of two files", f"{a} and {b}", {a: files[b], b: files[a]})
             for a in names for b in names if a < b),
            (Damage("swapped, of two checkpoints", name, {name: older[name]})
             for name in names if name in older),
        ),
    )  # fmt: skip


def json_damages(files: Files) -> Iterator[Damage]:
    """Keys that stand twice, and texts that are no JSON, or not ours."""
    for name in (INDEX, MANIFEST):
        text = files[name].decode("ascii")
        keys = json.loads(text)
        members = {**keys, **keys["body"]} if name == MANIFEST else keys
        for key, value in members.items():
            for other in (value, None, 1):
                again = f"{json.dumps(key)}:{json.dumps(other, separators=(',', ':'))},"
                for place in (f"{json.dumps(key)}:", "{"):
                    twice = text.replace(place, again + place if place != "{" else "{" + again, 1)
                    yield Damage("duplicate key", f"{name}: {key}", {name: twice.encode("ascii")})
        for what, data in _nonsense(files[name]):
            yield Damage("nonsense JSON", f"{name}: {what}", {name: data})


def manifest_damages(files: Files, older: Files) -> Iterator[Damage]:
    """A manifest that was edited, and its own checksum made right again."""
    edits: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
        ("a hash is another's", lambda b: _hashes(b, 0).__setitem__(0, _hashes(b, 1)[0])),
        ("a hash is flipped", lambda b: _hashes(b, 1).__setitem__(-1, "0" * 32)),
        ("a size is one more", lambda b: b["files"][1].update(size=b["files"][1]["size"] + 1)),
        ("a size is one less", lambda b: b["files"][1].update(size=b["files"][1]["size"] - 1)),
        ("a size is nothing", lambda b: b["files"][1].update(size=0, block_hashes=[])),
        ("shards are not listed", lambda b: b.update(files=b["files"][:1])),
        ("the index is not listed", lambda b: b.update(files=b["files"][1:])),
        ("a file that is not there", lambda b: b["files"].append(
            {"name": "rank-00999.data", "size": 1, "block_hashes": ["0" * 32]})),
        ("a file twice", lambda b: b["files"].append(b["files"][1])),
        ("two names swapped", lambda b: _swap_names(b["files"])),
        ("another block size", lambda b: b.update(block_size=4096)),
        ("another run", lambda b: b.update(run_id="another")),
        ("a higher step", lambda b: b.update(
            step=b["step"] + 1, name=b["name"].replace(f"{b['step']:08}", f"{b['step'] + 1:08}"))),
        ("a higher attempt", lambda b: b.update(attempt=9, name=b["name"].replace(".a1.", ".a9."))),
        ("another nonce", lambda b: b.update(nonce="0" * 8, name=b["name"][:-8] + "0" * 8)),
        ("a step that its name does not say", lambda b: b.update(step=b["step"] + 1)),
        ("the older one's files", lambda b: b.update(
            files=json.loads(older[MANIFEST])["body"]["files"])),
        ("a key that nobody knows", lambda b: b.update(extra=1)),
        ("no parent", lambda b: b.pop("parent")),
        ("no state", lambda b: b.update(state=None)),
    ]  # fmt: skip
    for what, edit in edits:
        body = json.loads(files[MANIFEST])["body"]
        edit(body)
        yield Damage("resealed manifest", what, {MANIFEST: _sealed(body)})


def _sealed(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    return f'{{"body":{text},"sha256":"{digest}"}}\n'.encode("ascii")


def _hashes(body: dict[str, Any], file: int) -> list[str]:
    return body["files"][file]["block_hashes"]


def _swap_names(files: list[dict[str, Any]]) -> None:
    files[0]["name"], files[1]["name"] = files[1]["name"], files[0]["name"]


def _differing(files: Files, damages: Iterator[Damage]) -> Iterator[Damage]:
    for damage in damages:
        if any(data != files.get(name) for name, data in damage.changes.items()):
            yield damage


def _bits(files: Files, dice: random.Random, count: int) -> Iterator[tuple[str, int, int]]:
    """Both ends of every file and block, then anywhere; every file as often as every other."""
    edges = [
        (name, at % len(data))
        for name, data in sorted(files.items())
        for border in range(0, len(data), BLOCK)
        for at in (border, border + 1, border - 1)
        if data
    ]
    names = sorted(name for name, data in files.items() if data)
    for number in range(count):
        if number < len(edges):
            name, at = edges[number]
        else:
            name = names[number % len(names)]
            at = dice.randrange(len(files[name]))
        yield name, at, dice.randrange(8)


def _flip(files: Files, name: str, at: int, bit: int) -> Damage:
    data = bytearray(files[name])
    data[at] ^= 1 << bit
    return Damage("flipped bit", f"{name}: bit {bit} of byte {at}", {name: bytes(data)})


def _page(
    files: Files, name: str, dice: random.Random, new: Callable[[int], bytes], kind: str
) -> Damage:
    data = files[name]
    at = dice.randrange(max(len(data) // PAGE, 1)) * PAGE
    page = new(at)[: len(data) - at]
    changed = data[:at] + page + data[at + len(page) :]
    return Damage(kind, f"{name}: page at {at}", {name: changed})


def _stale_page(files: Files, older: Files, name: str, dice: random.Random) -> Damage:
    """A write that was acknowledged and never reached the disk."""
    stale = older.get(name, b"")
    return _page(files, name, dice, lambda at: stale[at : at + PAGE], "stale page")


def _swapped_pages(files: Files, name: str, dice: random.Random) -> Damage:
    """A write that went to the wrong place."""
    data = files[name]
    pages = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
    a, b = dice.randrange(len(pages)), dice.randrange(len(pages))
    pages[a], pages[b] = pages[b], pages[a]
    return Damage("swapped pages", f"{name}: {a} and {b}", {name: b"".join(pages)})


def _lengths(data: bytes, dice: random.Random, count: int) -> list[int]:
    edges = {0, 1, len(data) - 1, len(data) // 2, len(data) // PAGE * PAGE, len(data) // BLOCK}
    anywhere = {dice.randrange(len(data)) for _ in range(count)}
    return sorted(length for length in edges | anywhere if length < len(data))


def _foreign(data: bytes, dice: random.Random) -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "random", dice.randbytes(len(data))
    yield "zeros", bytes(len(data))
    yield "ones", b"\xff" * len(data)
    yield "a program", b"\x7fELF" + dice.randbytes(60)
    yield "an archive", b"PK\x03\x04" + dice.randbytes(max(len(data) - 4, 0))
    yield "a pickle", b"\x80\x04cos\nsystem\n(X\x04\0\0\0true\x85R."
    yield "a page of an error", b"<html><body>502 Bad Gateway</body></html>\n"


def _nonsense(data: bytes) -> Iterator[tuple[str, bytes]]:
    yield "nothing", b""
    yield "null", b"null"
    yield "a list", b"[" + data.strip() + b"]"
    yield "an empty object", b"{}"
    yield "a text", json.dumps(data.decode("ascii")).encode("ascii")
    yield "not a number", data.replace(b":1", b":NaN", 1)
    yield "too large a number", data.replace(b":1", b":1e999", 1)
    yield "a truth for a number", data.replace(b":1", b":true", 1)
    yield "a long number", data.replace(b":1", b":" + b"9" * 5000, 1)
    yield "a comment", data.replace(b"{", b"{/**/", 1)
    yield "a comma too many", data.replace(b"}", b",}", 1)
    yield "single quotes", data.replace(b'"', b"'")
    yield "two of them", data + data
    yield "half of it", data[: len(data) // 2]
    yield "a byte order mark", b"\xef\xbb\xbf" + data
    yield "another encoding", data.decode("ascii").encode("utf-16")
    yield "no text", b"\xff" * len(data)
    yield "deep", b"[" * 100_000
    yield "deep objects", b'{"body":' * 50_000
