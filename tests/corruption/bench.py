"""Damages a store of two real checkpoints, looks what a restart would do, and puts it right again.

Every verdict is asked of three: ``verify_manifest`` with all block hashes, and ``resume`` as each
of the ranks that saved.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from slurm_forge.checkpoint.read.load import (
    read_index,
    resume,
)
from slurm_forge.errors import CheckpointMissingError, CheckpointRejectedError
from slurm_forge.store.blocks import verify_blocks
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from tests.corruption.contents import Contents, Wrapping, fill_store, open_store
from tests.corruption.damage import (
    Damage,
    file_damages,
    json_damages,
    manifest_damages,
)
from tests.distributed.ranks import run_ranks

OLDER, NEWEST = 1, 2


class Verdict(str, Enum):
    """What became of a damage."""

    DETECTED = "detected"
    #: Bytes changed and nothing of what they say: ``1e-05`` and ``1E-05`` are one number.
    SAME = "same meaning"
    SILENT = "SILENT"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a store came to be: by how many ranks and how wrapped, how many floats in the model."""

    ranks: int
    floats: int
    wrapping: Wrapping = Wrapping.PLAIN

    def __str__(self) -> str:
        return f"{self.ranks} rank(s), {self.wrapping.value}, {self.floats} floats"


class Bench:
    """One store in ``folder``.  What it looks like between two damages is always the same."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape = shape
        self._directory = folder / "checkpoints"
        what = (self._directory, shape.floats, shape.wrapping, (OLDER, NEWEST))
        names = (
            fill_store(0, *what)
            if shape.ranks == 1
            else run_ranks(shape.ranks, fill_store, *what)[0]
        )
        self.store: CheckpointStore = open_store(self._directory)
        self.older, self.newest = names
        self.files = {name: self._read(name) for name in names}
        self._pristine = self.store.verify_manifest(self.newest)
        self._expected = {name: Contents(name.step, shape.floats) for name in names}
        self._target = Contents(-1, shape.floats)

    def examine(self, damage: Damage) -> Verdict:
        """What a restart makes of it; AssertionError where anybody was fooled or disagrees."""
        with self.damaged(self.newest, damage):
            return self._judge(damage)

    @contextmanager
    def damaged(self, name: CheckpointName, damage: Damage) -> Iterator[None]:
        """The checkpoint ``name`` is damaged in the block."""
        folder = self.store.path(name)
        try:
            for file, data in damage.changes.items():
                if data is None:
                    (folder / file).unlink()
                else:
                    (folder / file).write_bytes(data)
            yield
        finally:
            for file in damage.changes:
                (folder / file).write_bytes(self.files[name][file])
                (folder / file).chmod(0o600)

    @contextmanager
    def rearranged(self, change: Callable[[Bench], None]) -> Iterator[None]:
        """Whole directories are renamed, copied or replaced in the block."""
        try:
            change(self)
            yield
        finally:
            shutil.rmtree(self._directory)
            self._directory.mkdir(mode=0o700)
            for name, files in self.files.items():
                self.store.path(name).mkdir(mode=0o700)
                for file, data in files.items():
                    (self.store.path(name) / file).write_bytes(data)
                    (self.store.path(name) / file).chmod(0o600)

    def is_whole(self, name: CheckpointName) -> bool:
        """Manifest, sizes, every block of every file, and the list of tensors."""
        try:
            manifest = self.store.verify_manifest(name)
            read_index(self.store.path(name), manifest)
            for file in manifest.files:
                path = self.store.path(name) / file.name
                blocks = range(len(file.block_hashes))
                list(verify_blocks(path, file, blocks, block_size=manifest.block_size))
        except CheckpointRejectedError as error:
            assert error.reason
            return False
        return True

    def resume(self, rank: int = 0) -> tuple[CheckpointName | None, list[CheckpointName]]:
        """What a restart goes on from (None: it refuses to), and what it passed over.

        AssertionError where one bit is not what was saved under that name.
        """
        passed: list[tuple[CheckpointName, str]] = []
        self._target.fill(-1)
        try:
            loaded = resume(
                self.store,
                self._target.state(-1, rank),
                group=None,
                on_reject=lambda name, why: passed.append((name, why)),
                patience=0.0,
            )
        except CheckpointMissingError:
            loaded = None
        else:
            assert loaded is not None, "a run with checkpoints would have begun anew"
        assert all(why for _, why in passed), "nobody is told why"
        rejected = [name for name, _ in passed]
        if loaded is None:
            return None, rejected
        name = loaded.manifest.name
        assert self._target.holds(self._expected[name]), f"loaded from {name}: other numbers"
        saved = self._expected[name].state(name.step, rank)
        assert loaded.extra == saved.extra
        (key,) = saved.rng
        assert loaded.rng[key].equal(saved.rng[key])
        return name, rejected

    def _judge(self, damage: Damage) -> Verdict:
        found = [self.resume(rank) for rank in range(self.shape.ranks)]
        if self.is_whole(self.newest):
            # Whatever changed says the same; whoever reads it reads what was written.
            assert found == [(self.newest, [])] * self.shape.ranks, (damage.kind, damage.what)
            assert self.store.verify_manifest(self.newest) == self._pristine
            return Verdict.SAME
        # A rank that does not read what is damaged may take it: the ranks decide together.
        allowed = ((self.older, [self.newest]), (self.newest, []))
        assert all(each in allowed for each in found), (damage.kind, damage.what, found)
        return Verdict.DETECTED if allowed[0] in found else Verdict.SILENT

    def _read(self, name: CheckpointName) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.store.path(name).iterdir()}


def catalogue(bench: Bench, *, seed: int, flips: int, texts: bool = True) -> Iterator[Damage]:
    """Every damage that is tried on a bench; without ``texts`` only those of any kind of file."""
    files, older = bench.files[bench.newest], bench.files[bench.older]
    yield from file_damages(files, older, seed=seed, flips=flips)
    if texts:
        yield from json_damages(files)
        yield from manifest_damages(files, older)
