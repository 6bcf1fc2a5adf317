"""Two nodes on a real NFS; scripts/shared-storage runs all mounts and all cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash import shim
from tests.shared_storage.machine import missing
from tests.shared_storage.repeater import PORT

ROOT = Path(__file__).parents[2]
_MISSING = missing() or ("" if shim.compiler() else "no C compiler here")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING), reason=f"shared storage is LEFT OUT: {_MISSING}"),
]


@pytest.mark.parametrize(
    ("mount", "more"),
    [
        ("vers=3", "struck"),
        ("vers=4.2", "struck"),
        (f"vers=4.0,port={PORT}", "repeated"),
        ("vers=4.2,nocto", "seconds"),
    ],
)
def test_two_nodes_see_what_counts(tmp_path: Path, mount: str, more: str) -> None:
    out = tmp_path / "found.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.shared_storage", "--json", str(out), "--mount", mount),
            *("--case", "claims_are_exclusive", "--case", "a_newer_launch_fences"),
            *("--case", "a_checkpoint_is_seen_when_it_is_published", "--case", "a_stop_is_seen"),
            *("--case", "struck_while_it_claims", "--case", "a_quota_is_exceeded"),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(found) >= 4 and not any(each["problems"] for each in found)
    assert any(each[more] for each in found)
