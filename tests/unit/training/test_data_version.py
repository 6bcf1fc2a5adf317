from __future__ import annotations

import json
import os
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.fingerprint import compare
from slurm_forge.spec.safeguards import EnvironmentSpec
from slurm_forge.training.data.dataset_fingerprint import (
    DataVersion,
    data_facts,
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for name, size in {"train/a.bin": 1200, "train/b.bin": 900, "val/c.bin": 10}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)
    return folder


def told(saved: DataVersion, now: DataVersion) -> list[str]:
    """What the differences and the policy say; both know of every change."""
    lines = list(saved.differences(now))
    found = compare(data_facts({"t": saved}), data_facts({"t": now}), EnvironmentSpec())
    assert bool(lines) == bool(found)
    return lines


def refuses(saved: DataVersion, now: DataVersion) -> bool:
    found = compare(data_facts({"t": saved}), data_facts({"t": now}), EnvironmentSpec())
    return any(each.policy.value == "refuse" for each in found)


def test_the_same_data_is_the_same_also_in_another_place(data: Path, tmp_path: Path) -> None:
    before = DataVersion.of([data])
    assert (before.whole.files, before.whole.size) == (3, 2110)
    data.rename(tmp_path / "staged")
    assert told(before, DataVersion.of([tmp_path / "staged"])) == []
    (tmp_path / "link").symlink_to(tmp_path / "staged")
    assert told(before, DataVersion.of([tmp_path / "link"])) == []


def test_every_change_is_named(data: Path) -> None:
    before = DataVersion.of([data])
    (data / "train" / "a.bin").write_bytes(b"x" * 1100)
    (data / "val" / "c.bin").unlink()
    (data / "val" / "d.bin").write_bytes(b"xx")
    now = DataVersion.of([data])
    assert told(before, now) == [
        "train/a.bin changed: 1.2 kB -> 1.1 kB",
        "val/c.bin is gone: 10 B",
        "val/d.bin is new: 2 B",
    ]
    assert refuses(before, now)


def test_new_times_alone_are_told_and_never_refused(data: Path) -> None:
    before = DataVersion.of([data])
    os.utime(data / "train" / "a.bin", ns=(1, 1))
    now = DataVersion.of([data])
    assert told(before, now) == [
        "files have other modification times, and the same names and sizes"
    ]
    assert not refuses(before, now)


def test_damage_inside_of_a_file_is_seen_by_those_who_ask_for_it(data: Path) -> None:
    before = DataVersion.of([data], contents=True)
    (data / "train" / "a.bin").write_bytes(b"x" * 1199 + b"y")
    now = DataVersion.of([data], contents=True)
    assert told(before, now) == ["train/a.bin changed, and is 1.2 kB as before"]
    assert refuses(before, now)
    os.utime(data / "train" / "a.bin", ns=(1, 1))
    assert told(now, DataVersion.of([data], contents=True)) == []


def test_asking_for_contents_later_is_no_difference(data: Path) -> None:
    one, two = DataVersion.of([data]), DataVersion.of([data], contents=True)
    assert told(one, two) == told(two, one) == []
    (data / "new").write_bytes(b"x")
    assert told(one, DataVersion.of([data], contents=True)) == ["new is new: 1 B"]


def test_a_version_is_enough() -> None:
    assert told(DataVersion.of(version="v3"), DataVersion.of(version="v3")) == []
    assert told(DataVersion.of(version="v3"), DataVersion.of(version="v4")) == [
        "version v4, was v3"
    ]
    assert refuses(DataVersion.of(version="v3"), DataVersion.of(version="v4"))


def test_several_sources_keep_their_own_names(data: Path) -> None:
    before = DataVersion.of([data / "train", data / "val" / "c.bin"])
    assert set(before.parts) == {"train/a.bin", "train/b.bin", "c.bin"}
    twice = DataVersion.of([data / "train", data / ".." / "corpus" / "train"])
    assert set(twice.parts) == {"train/a.bin", "train/b.bin", "train~2/a.bin", "train~2/b.bin"}


def test_links_are_told_and_not_followed(data: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "big").write_bytes(b"x" * 5000)
    (data / "out").symlink_to(outside)
    (data / "loop").symlink_to(data)
    (data / "same").symlink_to(data / "val" / "c.bin")
    before = DataVersion.of([data], contents=True)
    assert (before.whole.files, before.whole.size) == (6, 2110)
    assert before.unreadable == ()
    (outside / "big").write_bytes(b"y" * 5000)
    assert told(before, DataVersion.of([data], contents=True)) == []
    (data / "out").unlink()
    (data / "out").symlink_to(tmp_path / "elsewhere")
    assert told(before, DataVersion.of([data], contents=True)) == [
        "out changed, and is 0 B as before"
    ]


def test_links_inside_are_the_same_in_another_place(data: Path, tmp_path: Path) -> None:
    (data / "same").symlink_to(data / "val" / "c.bin")
    before = DataVersion.of([data])
    data.rename(tmp_path / "staged")
    (tmp_path / "staged" / "same").unlink()
    (tmp_path / "staged" / "same").symlink_to(tmp_path / "staged" / "val" / "c.bin")
    assert told(before, DataVersion.of([tmp_path / "staged"])) == []


def test_the_order_that_things_are_listed_in_does_not_count(data: Path) -> None:
    roots = [data / "train", data / "val"]
    assert told(DataVersion.of(roots), DataVersion.of(roots[::-1])) == []


def test_times_are_not_told_where_something_else_is(data: Path) -> None:
    before = DataVersion.of([data], version="v1")
    os.utime(data / "train" / "a.bin", ns=(1, 1))
    assert told(before, DataVersion.of([data], version="v2")) == ["version v2, was v1"]


def test_what_cannot_be_looked_at_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = DataVersion.of([data])
    real = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("/val"):
            raise PermissionError(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    now = DataVersion.of([data])
    assert now.unreadable == ("val/",)
    assert told(before, now) == ["val/ can't be read now", "val/c.bin is gone: 10 B"]


def test_what_is_not_there_is_named_and_no_error(tmp_path: Path) -> None:
    found = DataVersion.of([tmp_path / "nothing"])
    assert found.unreadable == (str(tmp_path / "nothing"),)
    assert found.whole.files == 0


def test_a_pipe_is_no_data_and_nothing_waits_for_it(data: Path) -> None:
    before = DataVersion.of([data], contents=True)
    os.mkfifo(data / "pipe")
    assert told(before, DataVersion.of([data], contents=True)) == []


def test_many_files_are_told_by_folder(tmp_path: Path) -> None:
    for shard in range(20):
        (tmp_path / f"shard-{shard:02}").mkdir()
        for number in range(20):
            (tmp_path / f"shard-{shard:02}" / str(number)).write_bytes(b"")
    before = DataVersion.of([tmp_path])
    assert len(before.parts) == 20
    (tmp_path / "shard-07" / "3").write_bytes(b"hello")
    (tmp_path / "shard-09" / "3").unlink()
    assert told(before, DataVersion.of([tmp_path])) == [
        "shard-07/ changed: 20 files, 0 B -> 20 files, 5 B",
        "shard-09/ changed: 20 files, 0 B -> 19 files, 0 B",
    ]


def test_one_flat_folder_of_many_files_is_told_as_a_whole(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / str(number)).write_bytes(b"x")
    before = DataVersion.of([tmp_path])
    (tmp_path / "17").unlink()
    assert told(before, DataVersion.of([tmp_path])) == ["299 files, 299 B, was 300 files, 300 B"]
    for number in range(100):
        (tmp_path / str(number)).unlink(missing_ok=True)
    assert told(before, DataVersion.of([tmp_path])) == ["200 files, 200 B, was 300 files, 300 B"]


def test_names_that_are_no_text_are_written_as_text(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\xfe")).write_bytes(b"x")
    found = DataVersion.of([tmp_path])
    assert list(found.parts) == ["\\xff\\xfe"]
    assert DataVersion.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_it_survives_the_manifest(data: Path) -> None:
    for contents in (False, True):
        found = DataVersion.of([data], version="v1", contents=contents)
        assert DataVersion.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("kind", [str, Path])
def test_one_place_needs_no_list(data: Path, kind: type[str] | type[Path]) -> None:
    assert DataVersion.of(kind(data)) == DataVersion.of([data])
    assert DataVersion.of(kind(data / "val" / "c.bin")).whole.size == 10


def limited(data: Path, looks: int) -> DataVersion:
    """With contents, where the time is up once the clock has been looked at so many times."""
    ticks = count()
    return DataVersion.of(
        data,
        version="v1",
        contents=True,
        within=timedelta(minutes=10),
        clock=lambda: 601.0 if next(ticks) >= looks else 0.0,
    )


CONTENTS = "stopped after 10m: contents not compared"
FILES = "stopped after 10m: files not compared"


def test_contents_that_take_too_long_are_told_and_not_compared(data: Path) -> None:
    whole = DataVersion.of(data, version="v1", contents=True)
    assert limited(data, 10_000) == whole
    found = {limited(data, looks).stopped: looks for looks in range(40)}
    late = limited(data, found[CONTENTS])  # the very last look was too late
    assert late.contents == ""
    assert late.whole == whole.whole
    assert late.differences(late) == (CONTENTS,)
    assert whole.differences(late) == (CONTENTS,)
    assert late.differences(whole) == (f"when it was saved: {CONTENTS}",)
    assert not refuses(whole, late)
    assert not refuses(late, whole)
    (data / "val" / "c.bin").write_bytes(b"xx")
    late = limited(data, found[CONTENTS])
    assert whole.differences(late) == (CONTENTS, "val/c.bin changed: 10 B -> 2 B")
    assert refuses(whole, late)


def test_files_that_take_too_long_to_look_at_are_told_and_not_compared(data: Path) -> None:
    whole = DataVersion.of(data, version="v1", contents=True)
    found = {limited(data, looks).stopped: looks for looks in range(40)}
    for looks in range(1, found[FILES] + 1):
        late = limited(data, looks)
        assert (late.whole.files, late.parts, late.version) == (0, {}, "v1")
        assert whole.differences(late) == (FILES,)
        assert late.differences(whole) == (f"when it was saved: {FILES}",)
        assert not refuses(whole, late)
        assert not refuses(late, whole)
    assert DataVersion.from_json(json.loads(json.dumps(late.to_json()))) == late
    assert DataVersion(version="v2").differences(late) == ("version v1, was v2", FILES)


def test_a_manifest_from_before_there_was_a_limit_is_understood(data: Path) -> None:
    found = DataVersion.of(data)
    saved = found.to_json()
    del saved["stopped"]
    assert DataVersion.from_json(saved) == found


@given(
    st.recursive(
        st.none() | st.text(max_size=3) | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.fixed_dictionaries(
                dict.fromkeys(
                    ("version", "whole", "times", "contents", "parts", "unreadable"), inner
                )
            )
        ),
        max_leaves=20,
    )
)
def test_nothing_in_a_manifest_breaks_it(value: object) -> None:
    found = DataVersion.from_json(value)
    assert found is None or found.differences(found) == ()
