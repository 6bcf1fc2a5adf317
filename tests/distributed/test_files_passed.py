"""How much of the package one has to open to follow a training step."""

from __future__ import annotations

import pytest

from benchmarks.files_passed.training import measure_both

pytestmark = [pytest.mark.distributed]

#: A reader follows that many files at most through an ordinary step, and through a skipped one.
#: Behind a skipped one it is asked which device is in use.
_MOST, _MOST_NAN = 20, 26


def test_a_step_runs_through_few_files() -> None:
    step, nan = measure_both()
    assert "training/step/gradient_guard.py" in step.files
    assert "training/instability/diagnosis.py" in nan.files
    assert len(step.files) <= _MOST, sorted(step.files)
    assert len(nan.files) <= _MOST_NAN, sorted(nan.files)
