from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.site.model import Site, storage_at

SITE = Site.model_validate(
    {
        "name": "hill",
        "storage": [
            {"role": "scratch", "path": "/scratch/users/$USER", "purge_after": "30d"},
            {"role": "fast", "path": "/scratch/users/<name>/fast", "purge_after": "10d"},
            {"role": "lab", "env": "LAB", "purge_after": "90d"},
            {"role": "home", "path": "/home"},
        ],
    }
)


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("/scratch/users/ann/runs/a", "scratch"),
        ("/scratch/users/ann", "scratch"),
        ("/scratch/users/ann/fast/runs", "fast"),
        ("/scratch/users", None),
        ("/scratch/usersann/x", None),
        ("/labs/blue/runs", "lab"),
        ("/labs/bluefish/runs", None),
        ("/home/ann", "home"),
        ("/tmp", None),
    ],
)
def test_the_innermost_place_that_a_path_lies_in(path: str, role: str | None) -> None:
    found = storage_at(SITE, Path(path), {"LAB": "/labs/blue/"})
    assert (None if found is None else found.role) == role


def test_a_link_to_a_storage_is_seen_through(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    site = Site.model_validate(
        {"name": "hill", "storage": [{"role": "scratch", "path": str(tmp_path / "real")}]}
    )
    assert storage_at(site, tmp_path / "link" / "runs", {}) is not None


def test_an_unset_variable_names_no_place() -> None:
    site = Site.model_validate({"name": "hill", "storage": [{"role": "x", "env": "SCRATCH"}]})
    assert storage_at(site, Path("/anything"), {}) is None
