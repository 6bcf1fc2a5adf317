"""What the tests of training share."""

from __future__ import annotations

import pytest

from slurm_forge.training.checkpointing import environment_fingerprint


@pytest.fixture(autouse=True)
def no_revision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches do not ask git what this repository's revision is: four processes each time."""
    if "test_environment" not in request.module.__name__:
        monkeypatch.setattr(environment_fingerprint.WorkTree, "around", lambda *_: None)
