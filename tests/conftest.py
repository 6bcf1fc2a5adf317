"""What holds for all tests."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from slurm_forge.testing.cluster.machine import path_with_prefix

# A property is about values, not about time: a busy machine must not make one fail.  What finds
# something new looks for long: scripts/test --all has it look twenty times as long.
settings.register_profile("ci", deadline=None, print_blob=True, max_examples=25)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=500)
settings.load_profile("ci")

# No test strikes nodes of the person who runs it, nor leaves out what that person's runs have.
os.environ["SLURM_FORGE_NODES"] = "off"
# Nor is anything of that person's settings what is tested.
os.environ["XDG_CONFIG_HOME"] = "/nowhere/settings"

# A shell that starts the tests in the background has SIGINT ignored, and so would every program
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which Slurm the tests on a real one boot."""
    parser.addoption(
        "--slurm",
        type=Path,
        metavar="PREFIX",
        help="run the tests on a real Slurm on the one below PREFIX, not the one on PATH",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Clusters, clients and jobs take Slurm's programs from PATH."""
    prefix: Path | None = config.getoption("--slurm")
    os.environ["PATH"] = path_with_prefix(os.environ.get("PATH", os.defpath), prefix)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Which Slurm it is, where it is not the one on PATH."""
    prefix: Path | None = config.getoption("--slurm")
    return None if prefix is None else f"Slurm of {prefix}"


def pytest_collection_finish() -> None:
    """What is imported and collected lives until the end: no collection has to look at it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A worker can't send text that has no bytes, such as half of a surrogate pair.

    It would end with an internal error that names no reason, and the other tests with it.
    """
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {key: _sendable(one) for key, one in value.items()}
        case list() | tuple():
            return type(value)(_sendable(one) for one in value)
        case _:
            return value


@pytest.fixture(scope="session")
def numbers() -> Iterator[int]:
    """What tells apart the folders of tests of one name."""
    return itertools.count()


@pytest.fixture
def tmp_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, numbers: Iterator[int]
) -> Path:
    """A folder of the test's own, in pytest's.

    pytest's own fixture looks for a free name among those of all tests before, which are thousands,
    and keeps a link for each: milliseconds per test.
    """
    words = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{words}-{next(numbers)}"
    path.mkdir(mode=0o700)
    return path
