"""What outlives a process is written as it was, and what was written is read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import get_args

import pytest

from slurm_forge import ForgeJob
from tests.golden.entries import ENTRIES, FILES, Entry
from tests.golden.regenerate import differences
from tests.golden.samples import kinds_of, sample

_RENEW = "If that is what is meant, and old files are still read: python -m tests.golden.regenerate"


def test_everything_is_written_as_it_was() -> None:
    told = differences()
    assert not told, "\n".join([*told, _RENEW])


@pytest.mark.parametrize("entry", ENTRIES, ids=[each.file for each in ENTRIES])
def test_what_was_written_is_read_back(entry: Entry) -> None:
    assert entry.read((FILES / entry.file).read_bytes()) == entry.value


def test_they_are_small() -> None:
    assert sum(path.stat().st_size for path in FILES.rglob("*") if path.is_file()) < 400_000


def test_what_earlier_versions_wrote_is_read() -> None:
    """Their pickles name the module; they lie in submitit's folders until their job ends."""
    assert pickle.loads((FILES / "earlier" / "job.pkl").read_bytes()) == ForgeJob("/runs/tiny")


def test_a_kind_without_a_sample_is_noticed() -> None:
    class Unknown:
        """Nothing that is written down."""

    with pytest.raises(TypeError, match=r"add one to tests/golden/samples.py"):
        sample(Unknown)
    assert kinds_of(int | str) == get_args(int | str)


def test_each_file_is_somebodys() -> None:
    assert {path.name for path in FILES.iterdir() if path.is_dir()} == {
        "earlier", "kept", "scripts", "sites"
    }  # fmt: skip
    assert [path for path in Path(FILES, "earlier").iterdir() if path.name != "job.pkl"] == []
