"""What outlives a process is written as it was, and what was written is read."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from yaml import safe_load

from slurm_forge import ForgeJob
from slurm_forge.spec.run_file import FORMAT, read_run_file
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


def _keys(value: object, where: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{where}.{key}"
            yield from _keys(inner, f"{where}.{key}")


def test_what_earlier_versions_wrote_as_run_yaml_is_read(tmp_path: Path) -> None:
    for kept in sorted(Path(FILES, "kept").glob("run-*.yaml")):
        file = tmp_path / kept.name
        file.write_bytes(kept.read_bytes())
        assert read_run_file(file).format_version == kept.stem.removeprefix("run-")


def test_a_new_key_of_run_yaml_has_a_new_minor_version() -> None:
    """Else a slurm_forge without that key takes it for a mistake and refuses the run."""
    now, kept = (
        set(_keys(safe_load(Path(FILES, name).read_text())))
        for name in ("run.yaml", f"kept/run-{FORMAT}.yaml")
    )
    assert now == kept, (
        "raise the minor version of FORMAT in slurm_forge/spec/run_file.py, and keep a copy of "
        "tests/golden/files/run.yaml in kept/, which is never written anew"
    )


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
