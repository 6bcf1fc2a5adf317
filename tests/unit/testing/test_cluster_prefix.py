"""A test cluster of a Slurm that lies below a prefix of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_forge.errors import ConfigError
from slurm_forge.testing.cluster import ClusterSpec, SlurmCluster
from slurm_forge.testing.cluster.__main__ import main
from slurm_forge.testing.cluster.machine import path_with_prefix

#: Nothing is made in it: the clusters here are never started.
SHORT = Path("/nowhere/c")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    found = tmp_path / "slurm-99.05.1"
    for name in ("bin/sbatch", "sbin/slurmctld"):
        program = found / name
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return found


def test_its_programs_come_before_those_on_path(prefix: Path) -> None:
    path = path_with_prefix("/usr/bin:/bin", prefix)
    assert path == f"{prefix}/bin:{prefix}/sbin:/usr/bin:/bin"
    assert path_with_prefix(path, prefix) == path
    assert path_with_prefix("/usr/bin:/bin", None) == "/usr/bin:/bin"


def test_a_prefix_without_slurm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no Slurm") as refusal:
        SlurmCluster(SHORT, ClusterSpec(prefix=tmp_path))
    assert "build-slurm" in refusal.value.next_step


def test_clients_of_the_cluster_are_those_of_its_slurm(prefix: Path) -> None:
    environment = {"PATH": os.defpath}
    cluster = SlurmCluster(SHORT, ClusterSpec(prefix=prefix), environment=environment)
    assert cluster.env["PATH"].split(os.pathsep)[0] == f"{prefix}/bin"


@pytest.mark.parametrize(
    ("given", "named"),
    [([], ""), (["--dir", "/nowhere/c"], " --dir /nowhere/c")],
)
def test_up_says_what_to_type_next_for_the_directory_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    named: str,
) -> None:
    monkeypatch.setattr(SlurmCluster, "start", lambda _: None)
    monkeypatch.setattr("slurm_forge.testing.cluster.__main__._describe", lambda _: "described")
    monkeypatch.setattr("slurm_forge.testing.cluster.__main__._exports", lambda _: "exported")
    assert main(["up", *given]) == 0
    shown = capsys.readouterr().out
    assert f"python -m slurm_forge.testing.cluster shell{named}\n" in shown
    assert f"python -m slurm_forge.testing.cluster down{named}\n" in shown
