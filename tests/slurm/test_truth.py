"""Right cause and right action for each kind of trouble, on a real Slurm (scripts/truth-table).

One of each class here; the others are slow, and part of the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_forge.testing.cluster import SlurmCluster
from tests.slurm.truth.cells import CELLS, Cell
from tests.slurm.truth.ours import References, run_ours

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=cell.name, marks=() if cell.representative else (pytest.mark.slow,))
        for cell in CELLS
    ],
)
def test_right_cause_and_right_action(
    cell: Cell, slurm: SlurmCluster, tmp_path: Path, references: References
) -> None:
    row = run_ours(cell, slurm, tmp_path / "cell", references)
    if row.skipped:
        pytest.skip(row.skipped)
    assert row.passed, "\n".join([row.outcome, *row.complaints])
