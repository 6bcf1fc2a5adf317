"""The proof on real hardware tells what failed and what did not run; the rest of it needs a GPU."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu_proof.benchmarks import guard_figures, probe_figures, stall_figures
from tests.gpu_proof.outcomes import (
    Check,
    Figure,
    Outcome,
    Proof,
    as_json,
    as_page,
    checks_of_junit,
)

JUNIT = """\
<testsuites><testsuite>
<testcase classname="tests.gpu.test_guard" name="test_a" time="1.5"/>
<testcase classname="tests.gpu.test_guard" name="test_b"><failure message="it | waits"/></testcase>
<testcase classname="tests.gpu.test_probe" name="test_c"><error message="no NCCL"/></testcase>
<testcase classname="tests.gpu.test_probe" name="test_d"><skipped message="one device"/></testcase>
</testsuite></testsuites>
"""
checks = st.builds(
    Check, st.just("tests"), st.text(), st.sampled_from(Outcome), st.text(), st.floats(0, 1e3)
)


def test_a_skipped_test_did_not_run_and_an_error_is_a_failure():
    found = checks_of_junit("tests", JUNIT)
    assert [check.outcome for check in found] == [
        Outcome.PASSED,
        Outcome.FAILED,
        Outcome.FAILED,
        Outcome.NOT_RUN,
    ]
    assert found[3].detail == "one device"


@given(st.lists(checks, max_size=6))
def test_only_what_ran_and_passed_as_a_whole_is_a_proof(found: list[Check]):
    proof = Proof({"device": "made | up"}, found, [Figure("probe", 3.0, "us", 2.0)], 12.0)
    whole = bool(found) and all(check.outcome is Outcome.PASSED for check in found)
    assert proof.holds is whole
    page, data = as_page(proof, command="scripts/gpu-proof"), as_json(proof)
    assert ("**Proven" in page) is whole
    rehearsal = dataclasses.replace(proof, rehearsal=True)
    assert "roven" not in as_page(rehearsal, command="scripts/gpu-proof")
    assert data["holds"] is whole
    assert len(data["checks"]) == len(found)
    json.dumps(data)
    assert "**missed**" in page
    # Whatever a check is called, it is one row of the table.
    rows = [line for line in page.splitlines() if line.startswith("| tests |")]
    assert len(rows) == len(found)


def test_figures_come_from_what_the_benchmarks_write():
    turn = {"guard on": {"wall": 1.02}, "guard off": {"wall": 1.0}}
    (guard,) = guard_figures({"parts": [{"rounds": [turn, turn]}]})
    assert (round(guard.value, 6), guard.met) == (2.0, False)
    ours = {"stall_s": 0.2, "blocked_s": 0.1}
    found = stall_figures(
        {
            "parts": [
                {
                    "size": {"gib": 0.5},
                    "rounds": [
                        {
                            "compute: slurm_forge, background": ours,
                            "compute: dcp.async_save, thread, kept stager": {"stall_s": 0.9},
                        }
                    ],
                }
            ]
        }
    )
    assert [figure.value for figure in found] == [0.2, 0.9, 0.1]
    assert found[0].name == "a save of 0.5 GiB, lost to training"
    probe = probe_figures({"probe": {"issue_us": [60.0], "latency_us": [500.0]}})
    assert probe[0].met
    assert probe[2].value == pytest.approx(1e-4)


@pytest.mark.slow
def test_without_an_accelerator_it_proves_nothing_and_says_what_to_do(tmp_path: Path):
    torch = pytest.importorskip("torch")
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu_proof", "--page", str(tmp_path / "page.md")],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "FORGE_VENV" in ended.stderr
    assert not (tmp_path / "page.md").exists()
