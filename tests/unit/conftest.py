"""What holds for the tests of one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def disk_without_waits() -> Iterator[None]:
    """Nothing waits for the disk: what a power loss leaves is tested in tests/crash."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        yield
