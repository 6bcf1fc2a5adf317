"""Any part of any tensor, into any memory: right, verified before it arrives, and read once."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slurm_forge.checkpoint.read import shard_reader as shardread
from slurm_forge.checkpoint.read.shard_reader import ShardReader
from slurm_forge.checkpoint.write.direct_io import PAGE
from slurm_forge.errors import CheckpointRejectedError, UnsafeFileError
from tests.unit.checkpoint.helpers import bitwise, open_descriptors, write_shards

BLOCK = PAGE
KINDS = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
LAYOUTS = ["contiguous", "transposed", "every other", "a parameter"]


class Targets:
    """What a rank wants: parts of tensors by key and offsets, as DCP's load planner tells them."""

    def __init__(self, index, wanted):
        self.tensors, self.plan, self.committed = {}, LoadPlan([]), []
        known = index.to_metadata().state_dict_metadata
        for key, offsets, target in wanted:
            chunk = ChunkStorageMetadata(torch.Size(offsets), target.shape)
            items = create_read_items_for_chunk_list(key, known[key], [chunk])
            self.plan.items.extend(items)
            self.tensors[key, tuple(offsets)] = target

    def resolve_tensor(self, item):
        whole = self.tensors[item.dest_index.fqn, tuple(item.dest_index.offset)]
        return narrow_tensor_by_index(whole, item.dest_offsets, item.lengths)

    def commit_tensor(self, item, tensor):
        self.committed.append(item.dest_index.fqn)


def read(directory, manifest, index, wanted, **options):
    targets = Targets(index, wanted)
    ShardReader(directory, manifest, index, **options).read_data(targets.plan, targets).wait()
    assert len(targets.committed) == len(targets.plan.items)


def room(sizes, kind, layout):
    """A target of these sizes: of its memory only the target itself may change."""
    if layout == "transposed":
        order = tuple(reversed(range(len(sizes))))
        return torch.zeros(tuple(reversed(sizes)), dtype=kind).permute(order)
    if layout == "every other" and sizes:
        return torch.zeros((*sizes[:-1], 2 * sizes[-1]), dtype=kind)[..., ::2]
    made = torch.zeros(tuple(sizes), dtype=kind)
    floating = kind.is_floating_point or kind.is_complex
    return torch.nn.Parameter(made) if layout == "a parameter" and floating else made


def some_tensor(seed, shape, kind):
    made = torch.randint(0, 256, (*shape, kind.itemsize), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip
    return made.view(kind).reshape(shape) if made.numel() else torch.empty(shape, dtype=kind)


@st.composite
def cases(draw):
    """Tensors, each cut by a grid into shards, and the parts of them that are wanted."""
    tensors, wanted = {}, []
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(KINDS))
        shape = draw(st.lists(st.integers(0, 40), max_size=3))
        shape = [min(size, 12) for size in shape] if len(shape) == 3 else shape
        grid = []
        for size in shape:
            cuts = draw(st.lists(st.integers(1, max(size - 1, 1)), max_size=2, unique=True))
            borders = sorted({0, *(cut for cut in cuts if cut < size), size})
            grid.append(list(itertools.pairwise(borders)) or [(0, 0)])
        parts = [
            ([low for low, _ in cell], [high - low for low, high in cell])
            for cell in itertools.product(*grid)
        ]
        key = f"t{number}"
        tensors[key] = (some_tensor(draw(st.integers(0, 99)), shape, kind), parts)
        for _ in range(draw(st.integers(1, 2))):
            spans = [sorted(draw(st.tuples(*[st.integers(0, s)] * 2))) for s in shape]
            spans = spans if draw(st.booleans()) else [(0, size) for size in shape]
            wanted.append((key, spans, draw(st.sampled_from(LAYOUTS))))
    return tensors, wanted, draw(st.integers(1, 3)), draw(st.booleans())


@contextmanager
def small_windows(blocks=3):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardread, "_WINDOW", blocks * BLOCK)
        yield patch


def check(folder, tensors, wanted, files=2, **options):
    """Save, read the wanted parts, compare."""
    manifest, index = write_shards(folder, tensors, files=files, block_size=BLOCK)
    targets = []
    for key, spans, layout in wanted:
        sizes = [high - low for low, high in spans]
        made = room(sizes, tensors[key][0].dtype, layout)
        targets.append((key, [low for low, _ in spans], made))
    if len({(key, tuple(offsets)) for key, offsets, _ in targets}) != len(targets):
        targets = list({(key, tuple(offsets)): (key, offsets, t)
                        for key, offsets, t in targets}.values())  # fmt: skip
    read(folder, manifest, index, targets, **options)
    for key, offsets, target in targets:
        place = tuple(slice(o, o + s) for o, s in zip(offsets, target.shape, strict=True))
        assert bitwise(target, tensors[key][0][place]), (key, place)
    return targets


@given(cases())
def test_any_part_of_any_tensor_in_any_shards_is_what_was_saved(tmp_path_factory, case):
    tensors, wanted, files, direct = case
    with small_windows():
        check(tmp_path_factory.mktemp("c"), tensors, wanted, files=files, direct=direct)


def halves(length, parts=2):
    cuts = [length * n // parts for n in range(parts + 1)]
    return list(itertools.pairwise(cuts))


def rows(shape, parts):
    return [([low, 0], [high - low, shape[1]]) for low, high in halves(shape[0], parts)]


def columns(shape, parts):
    return [([0, low], [shape[0], high - low]) for low, high in halves(shape[1], parts)]


BIG = torch.arange(200 * 130, dtype=torch.float64).reshape(200, 130)  # 51 blocks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("saved", [rows, columns])
@pytest.mark.parametrize("loaded", ["whole", "rows", "columns", "inside"])
def test_shards_that_cross_blocks_and_windows(tmp_path, saved, loaded, layout):
    spans = {
        "whole": [[(0, 200), (0, 130)]],
        "rows": [[span, (0, 130)] for span in halves(200, 3)],
        "columns": [[(0, 200), span] for span in halves(130, 3)],
        "inside": [[(17, 180), (3, 111)]],
    }[loaded]
    tensors = {"w": (BIG, saved(BIG.shape, 4)), "s": (torch.tensor(2.5), [([], [])])}
    wanted = [*(("w", span, layout) for span in spans), ("s", [], layout)]
    with small_windows():
        check(tmp_path, tensors, wanted)


def test_a_target_of_one_element_between_others(tmp_path):
    """torch calls it contiguous, whatever its stride."""
    between = torch.zeros(6).reshape(2, 3)[1:, ::3]
    assert between.is_contiguous() and between.stride(-1) == 3
    tensors = {"w": (torch.tensor([[7.0]]), [([0, 0], [1, 1])])}
    manifest, index = write_shards(tmp_path, tensors)
    read(tmp_path, manifest, index, [("w", [0, 0], between)])
    assert between._base.flatten().tolist() == [0, 0, 0, 7, 0, 0]


def test_what_lies_around_a_target_is_left_alone(tmp_path):
    with small_windows():
        targets = check(
            tmp_path, {"w": (BIG, rows(BIG.shape, 3))}, [("w", [(5, 150), (2, 90)], "every other")]
        )
    (_, _, target) = targets[0]
    whole = target._base.reshape(145, 88, 2)
    assert (whole[..., 1] == 0).all()


def refuse_direct(patch):
    real = os.preadv

    def refusing(descriptor, buffers, at):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here, after all")
        return real(descriptor, buffers, at)

    patch.setattr(os, "preadv", refusing)


def read_short(patch):
    real, chance = os.preadv, random.Random(5)

    def short(descriptor, buffers, at):
        count = chance.choice([1, 512, PAGE, PAGE + 1])
        plain = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        try:
            return real(plain, [buffers[0][:count]], at)
        finally:
            os.close(plain)

    patch.setattr(os, "preadv", short)


@pytest.mark.parametrize("trouble", [refuse_direct, read_short])
def test_reads_that_are_refused_or_short_change_nothing(tmp_path, trouble):
    with small_windows() as patch:
        trouble(patch)
        check(tmp_path, {"w": (BIG, rows(BIG.shape, 3))}, [("w", [(0, 200), (0, 130)], "")])


def watch_reads(patch):
    """Which blocks of which file were read, how often."""
    seen, real = Counter(), os.preadv

    def watched(descriptor, buffers, at):
        count = real(descriptor, buffers, at)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        seen.update((name, block) for block in range(at // BLOCK, -(-(at + count) // BLOCK)))
        return count

    patch.setattr(os, "preadv", watched)
    return seen


@pytest.mark.parametrize("window", [1, 3, 1000])
def test_each_block_that_is_needed_is_read_once_and_no_other(tmp_path, window):
    torch.manual_seed(0)
    small = {f"s{n}": (torch.randn(30), [([0], [10]), ([10], [20])]) for n in range(50)}
    tensors = {**small, "w": (BIG, rows(BIG.shape, 4))}
    manifest, index = write_shards(tmp_path, tensors, files=2, block_size=BLOCK)
    full = [(key, [0] * tensor.dim(), torch.zeros_like(tensor))
            for key, (tensor, _) in tensors.items()]  # fmt: skip
    with small_windows(window) as patch:
        seen = watch_reads(patch)
        read(tmp_path, manifest, index, full)
        everything = {(f.name, n) for f in manifest.files for n in range(len(f.block_hashes))}
        assert set(seen) == everything and set(seen.values()) == {1}
        seen.clear()
        read(tmp_path, manifest, index, [("w", [60, 0], torch.zeros(3, 130, dtype=BIG.dtype))])
    place = next(p for shard, p in index.tensors["w"].shards if shard.offsets[0] == 50)
    begin = place.at + 10 * 130 * 8
    needed = range(begin // BLOCK, (begin + 3 * 130 * 8 - 1) // BLOCK + 1)
    assert seen == Counter({(index.files[place.file], block): 1 for block in needed})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", [0, BLOCK - 1, 3 * BLOCK + 8, 20 * BLOCK + 1, -1])
def test_a_changed_byte_reaches_no_target(tmp_path, position, layout):
    tensors = {"w": (BIG + 1, [([0, 0], [200, 130])])}
    manifest, index = write_shards(tmp_path, tensors, block_size=BLOCK)
    path = tmp_path / manifest.files[0].name
    content = bytearray(path.read_bytes())
    position %= len(content)
    content[position] ^= 64
    path.write_bytes(content)
    target = room([200, 130], BIG.dtype, layout)
    with small_windows():
        with pytest.raises(CheckpointRejectedError, match=f"block {position // BLOCK} "):
            read(tmp_path, manifest, index, [("w", [0, 0], target)])
    element = position // 8
    assert target[element // 130, element % 130] == 0
    arrived = target != 0
    assert torch.equal(target[arrived], tensors["w"][0][arrived])


def test_damage_in_a_block_that_is_not_needed_does_not_matter(tmp_path):
    manifest, index = write_shards(tmp_path, {"w": (BIG, rows(BIG.shape, 1))}, block_size=BLOCK)
    path = tmp_path / manifest.files[0].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    target = torch.zeros(20, 130, dtype=BIG.dtype)
    read(tmp_path, manifest, index, [("w", [0, 0], target)])
    assert torch.equal(target, BIG[:20])


@pytest.mark.parametrize("how", ["swapped", "shorter", "longer", "gone", "a link", "writable"])
def test_another_file_than_the_manifests_is_refused(tmp_path, how):
    tensors = {"w": (BIG, rows(BIG.shape, 2))}
    manifest, index = write_shards(tmp_path, tensors, files=2, block_size=BLOCK)
    first, second = (tmp_path / entry.name for entry in manifest.files)
    if how == "swapped":
        first.rename(tmp_path / "x")
        second.rename(first)
        (tmp_path / "x").rename(second)
    elif how in ("shorter", "longer"):
        os.truncate(first, first.stat().st_size + (1 if how == "longer" else -1))
    elif how == "gone":
        first.unlink()
    elif how == "a link":
        first.rename(tmp_path / "x")
        first.symlink_to(tmp_path / "x")
    else:
        first.chmod(0o622)
    before = open_descriptors()
    target = torch.zeros_like(BIG)
    with pytest.raises((CheckpointRejectedError, UnsafeFileError, FileNotFoundError)):
        read(tmp_path, manifest, index, [("w", [0, 0], target)])
    assert (target == 0).all()
    assert open_descriptors() == before


def test_a_file_that_ends_while_it_is_read_is_refused(tmp_path, monkeypatch):
    tensors = {"w": (BIG, rows(BIG.shape, 1))}
    manifest, index = write_shards(tmp_path, tensors, block_size=BLOCK)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(CheckpointRejectedError, match="ended while it was read"):
        read(tmp_path, manifest, index, [("w", [0, 0], torch.zeros_like(BIG))])


def test_a_disk_that_fails_to_read_is_an_error_and_leaves_no_descriptor(tmp_path, monkeypatch):
    tensors = {"w": (BIG, rows(BIG.shape, 1))}
    manifest, index = write_shards(tmp_path, tensors, block_size=BLOCK)
    before = open_descriptors()

    def fail(*_):
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="injected"):
        read(tmp_path, manifest, index, [("w", [0, 0], torch.zeros_like(BIG))])
    assert open_descriptors() == before
