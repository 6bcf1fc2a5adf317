"""Which file system a folder lies on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.store.mounts import mount_of, parse_mounts, read_mounts

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,nosuid shared:2 - nfs4 nas:/home rw,vers=4.2,acregmin=3
31 22 0:41 / /scratch rw shared:3 - lustre 10.0.0.1@o2ib:/scratch rw,flock
32 22 0:42 / /scratch/my\\040lab ro - nfs nas:/lab ro,noac
33 22 0:43 / /gpfs rw - gpfs fs1 rw
not a line of it
"""


@pytest.mark.parametrize(
    ("path", "point", "kind", "shared", "caches"),
    [
        ("/home/ada/runs", "/home", "nfs4", True, True),
        ("/scratch/ada", "/scratch", "lustre", True, False),
        ("/scratch/my lab/runs", "/scratch/my lab", "nfs", True, False),
        ("/scratchy", "/", "ext4", False, False),
        ("/", "/", "ext4", False, False),
        ("/gpfs", "/gpfs", "gpfs", True, False),
    ],
)
def test_the_deepest_mount_counts(
    path: str, point: str, kind: str, shared: bool, caches: bool
) -> None:
    found = mount_of(path, parse_mounts(MOUNTINFO))
    assert found is not None
    assert (found.point, found.kind) == (point, kind)
    assert (found.over_network, found.caches_attributes) == (shared, caches)


def test_read_only_and_unknown() -> None:
    found = mount_of("/scratch/my lab", parse_mounts(MOUNTINFO))
    assert found is not None and found.is_read_only
    assert mount_of("/home", ()) is None


def test_this_machine(tmp_path: Path) -> None:
    found = mount_of(os.path.realpath(tmp_path), read_mounts())
    assert found is not None and not found.is_read_only
    assert Path(found.point).stat().st_dev == tmp_path.stat().st_dev


@given(st.text(max_size=200))
def test_any_text_is_read(text: str) -> None:
    for mount in parse_mounts(text):
        assert mount.kind is not None
