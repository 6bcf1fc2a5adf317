"""The real Slurm that these tests run on: booted once, used by one test at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.testing.cluster.machine import why_not_here
from tests.slurm.harness import left_in_peace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the cluster carries the marker, so that it can be left out by name."""
    for item in items:
        if "needs_slurm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failure shows what the daemons had to say."""
    outcome = yield
    report = outcome.get_result()
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, SlurmCluster):
        report.sections.append(("queue", cluster.queue()))
        report.sections.append(("slurm daemons", cluster.logs()))


@pytest.fixture(scope="session")
def needs_slurm() -> None:
    """Skips where no cluster can be started, and says why."""
    reason = why_not_here(os.environ.get("PATH", os.defpath))
    if reason is not None:
        pytest.skip(
            f"the tests on a real Slurm were left out: {reason}"
            " (python -m slurm_forge.testing.cluster up --install, as root)"
        )


@pytest.fixture
def slurm_directory(needs_slurm: None) -> Iterator[Path]:
    """A directory for a cluster of one's own: short, for the sockets, and open to other users."""
    with _short_directory() as directory:
        yield directory


@pytest.fixture(scope="session")
def cluster(needs_slurm: None) -> Iterator[SlurmCluster]:
    """The cluster of this session.  Tests ask for ``slurm``, which tidies up behind them."""
    with _short_directory() as directory:
        with SlurmCluster(directory) as running:
            yield running


@pytest.fixture
def slurm(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The session's cluster with an empty queue and idle nodes, before and after the test."""
    yield cluster
    cluster.reset()
    assert cluster.run("squeue", "-a", "-h").stdout == ""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """Digest and samples of 60 steps of ``tests/jobs.py`` on two ranks that nothing happened to."""
    return left_in_peace(tmp_path_factory.mktemp("undisturbed"), ranks=2, args={"steps": 60})


@contextlib.contextmanager
def _short_directory() -> Iterator[Path]:
    # Not pytest's own: that may be too long for a socket, and nobody else may enter it.
    path = Path(tempfile.mkdtemp(prefix="forge-", dir="/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
