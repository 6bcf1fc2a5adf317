"""The disk as a log of calls makes it, and as a power loss would leave it.

What POSIX promises and no more: the content of a file is safe after its fsync, its name after an
fsync of the folder that the name is in.  Everything else may be gone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from tests.crash.shim import SETTLED, Op, Record

#: Path below the root to content; None is a folder.
Tree: TypeAlias = "dict[str, bytes | None]"


class Loss(Enum):
    """What a power loss takes away of what was not made durable."""

    DATA = "power loss: data"
    METADATA = "power loss: metadata"
    BOTH = "power loss: both"
    #: Any part of it: each folder and each file keeps the first so many changes, by chance.
    SOME = "power loss: some"


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    #: How much of the durable content no truncation has touched since.
    kept: int = 0
    #: Since the last fsync: (offset, bytes), or (size, None) for a truncation or a growth.
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    #: After a failed fsync the kernel has dropped the pages: no later fsync brings them to disk.
    doomed: bool = False

    def write(self, offset: int, data: bytes) -> None:
        _write(self.data, offset, data)
        self.pending.append((offset, data))

    def resize(self, size: int) -> None:
        _resize(self.data, size)
        self.kept = min(self.kept, size)
        self.pending.append((size, None))

    def sync(self) -> None:
        if not self.doomed:
            self.durable, self.kept = bytes(self.data), len(self.data)
            self.pending.clear()

    def after(self, loss: Loss | None, chance: random.Random) -> bytes:
        if loss is None or not self.pending:
            return bytes(self.data)
        if loss is Loss.BOTH or (loss is Loss.METADATA and self.doomed):
            return self.durable
        if loss is Loss.METADATA:
            return bytes(self.data)
        if loss is Loss.DATA:  # the size is metadata: zeros, or nothing
            rest = len(self.data) - self.kept if chance.random() < 0.5 else 0
            return self.durable[: self.kept] + bytes(rest)
        found = bytearray(self.durable)
        for offset, data in self.pending[: chance.randrange(len(self.pending) + 1)]:
            _resize(found, offset) if data is None else _write(found, offset, data)
        return bytes(found)


@dataclass(eq=False)
class _Folder:
    entries: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)
    #: Since the last fsync: names that went, then names that came, at one moment.
    pending: list[tuple[str | None, str | None, _Node | None]] = field(default_factory=list)

    def change(self, gone: str | None, come: str | None, node: _Node | None) -> None:
        _change(self.entries, gone, come, node)
        self.pending.append((gone, come, node))

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()

    def after(self, loss: Loss | None, chance: random.Random) -> dict[str, _Node]:
        if loss is None or loss is Loss.DATA:
            return self.entries
        found = dict(self.durable)
        if loss is Loss.SOME:
            for gone, come, node in self.pending[: chance.randrange(len(self.pending) + 1)]:
                _change(found, gone, come, node)
        return found


_Node: TypeAlias = "_File | _Folder"


class Disk:
    """One directory, brought up to date record by record."""

    def __init__(self, root: int, records: Iterable[Record] = ()) -> None:
        self._root = _Folder()
        #: The newest node of each inode number: they are used again.
        self._nodes: dict[int, _Node] = {root: self._root}
        for record in records:
            self.apply(record)

    def apply(self, record: Record) -> None:
        """Do what was done."""
        match record.op:
            case Op.CREATE:
                self._nodes[record.inode] = _File()
                self._folder(record.directory).change(None, record.name, self._nodes[record.inode])
            case Op.MKDIR:
                self._nodes[record.inode] = _Folder()
                self._folder(record.directory).change(None, record.name, self._nodes[record.inode])
            case Op.LINK:
                self._folder(record.directory).change(None, record.name, self._nodes[record.inode])
            case Op.WRITE:
                self._file(record.inode).write(record.offset, record.data)
            case Op.TRUNCATE:
                self._file(record.inode).resize(record.length)
            case Op.GROW:
                file = self._file(record.inode)
                if record.length > len(file.data):
                    file.resize(record.length)
            case Op.SYNC:
                self._nodes[record.inode].sync()
            case Op.SYNC_FAILED:
                node = self._nodes[record.inode]
                if isinstance(node, _File) and node.pending:
                    node.doomed = True
            case Op.MARK if record.length == SETTLED:
                for node in self._nodes.values():
                    node.sync()
            case Op.UNLINK | Op.RMDIR:
                self._folder(record.directory).change(record.name, None, None)
            case Op.RENAME:
                source = self._folder(record.directory)
                target = self._folder(record.directory2)
                node = source.entries[record.name]
                if source is target:
                    source.change(record.name, record.name2, node)
                else:
                    source.change(record.name, None, None)
                    target.change(None, record.name2, node)

    def tree(self, loss: Loss | None = None, seed: int = 0) -> Tree:
        """Everything below the root: as it is, or as it is after a power loss."""
        found: Tree = {}
        self._walk(self._root, "", found, loss, random.Random(seed))
        return found

    def _walk(
        self, folder: _Folder, prefix: str, found: Tree, loss: Loss | None, chance: random.Random
    ) -> None:
        for name, node in sorted(folder.after(loss, chance).items()):
            if isinstance(node, _Folder):
                found[prefix + name] = None
                self._walk(node, f"{prefix}{name}/", found, loss, chance)
            else:
                found[prefix + name] = node.after(loss, chance)

    def _file(self, inode: int) -> _File:
        node = self._nodes[inode]
        assert isinstance(node, _File), "a folder was written into"
        return node

    def _folder(self, inode: int) -> _Folder:
        node = self._nodes[inode]
        assert isinstance(node, _Folder), "a file was taken for a folder"
        return node


def write_tree(tree: Tree, folder: Path) -> None:
    """Make it real, private to its owner."""
    folder.mkdir(mode=0o700)
    for name, content in tree.items():  # a folder comes before what is in it
        path = folder / name
        if content is None:
            path.mkdir(mode=0o700)
        else:
            path.write_bytes(content)
            path.chmod(0o600)


def read_tree(folder: Path) -> Tree:
    """What really lies there."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def _write(data: bytearray, offset: int, new: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(new)] = new


def _resize(data: bytearray, size: int) -> None:
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


def _change(
    entries: dict[str, _Node], gone: str | None, come: str | None, node: _Node | None
) -> None:
    if gone is not None:
        entries.pop(gone, None)
    if come is not None and node is not None:
        entries[come] = node
