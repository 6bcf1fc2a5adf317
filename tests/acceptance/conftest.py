"""What the acceptance tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.command import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A folder of the test's own."""
    return Project(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A folder that the tests of a module share."""
    return Project(tmp_path_factory.mktemp("project"))
