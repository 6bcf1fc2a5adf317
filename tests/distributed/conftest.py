"""What the tests with ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.launches import Gate


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A place in the program at which ranks stay until the test lets them go."""
    one = Gate()
    yield one
    one.close()
