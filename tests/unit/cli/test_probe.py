"""``probe``: what it is told of nodes, shown; where it can't look, and why."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.cli.cluster.probe_text import (
    probe_json,
    probe_text,
)
from slurm_forge.control.messages.preflight import Check, CheckVerdict, NodeReport
from slurm_forge.journal.events import PreflightMeasured
from slurm_forge.launch.diagnose.node_probe import (
    ProbeResult,
    ProbeTarget,
    look_at,
)
from slurm_forge.recovery.monitor.preflight_verdict import (
    PreflightRefusal,
    of_reports,
)
from tests.unit.cli.conftest import Shell
from tests.unit.cli.test_start import HEAVY, imported

_NAME = "SLURM_EXPORT_ENV"


def report(rank: int, *checks: Check) -> NodeReport:
    fine = Check(name="gpu", verdict=CheckVerdict.FINE, text="8 visible")
    return NodeReport(rank=rank, host=f"n{rank}", checks=(fine, *checks))


def looked(*reports: NodeReport, refused: PreflightRefusal | None = None) -> ProbeResult:
    measured = PreflightMeasured(ok=refused is None, hosts=len(reports), seconds=0.2)
    return ProbeResult(
        reports=reports, ahead={1: 7.0}, measured=measured, refused=refused, seconds=2.0
    )


def test_a_row_for_each_node_and_the_verdict() -> None:
    bad = Check(name="gpu computes", verdict=CheckVerdict.BAD, text="gpu 5: 2 wrong sums")
    reports = (report(0), report(1, bad), report(2))
    text = probe_text(looked(*reports, refused=of_reports(reports)), ("n1",))
    assert text.splitlines()[:4] == [
        "node  gpu   cpu  memory  storage  other  clock",
        "n0    8 ok  -    -       -        -      ok",
        "n1    BAD   -    -       -        -      +7.0 s  refused",
        "n2    8 ok  -    -       -        -      ok",
    ]
    assert "n1: gpu computes: gpu 5: 2 wrong sums" in text
    assert "bad: n1: gpu_error (likely)" in text
    assert "struck: n1." in text


def test_what_could_not_be_looked_at_is_said_so() -> None:
    nothing = ProbeResult(
        ahead={}, silent=("n1",), problem="after 300 s 0 of 1 nodes have answered"
    )
    assert "n1" in probe_text(nothing) and "could not look: after 300 s" in probe_text(nothing)
    assert probe_text(nothing).rstrip().endswith("have this Python, with torch.")
    found = json.loads(probe_json(nothing))
    assert (found["schema"], found["ok"], found["silent"]) == (1, None, ["n1"])


def test_outside_of_an_allocation_somebody_has_to_say_where(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    told = shell("probe")
    assert told.exit_code == 2
    assert "--job ID, --nodes N or --local N" in told.stderr
    assert shell("probe", "--job", "1", "--local", "2").exit_code == 2
    assert shell("probe", "--local", "2", "--strike").exit_code == 2
    assert shell("probe", "--local", "2", "-p", "gpu").exit_code == 2
    told = shell("probe", "--local", "2", "--within", "0s")
    assert (told.exit_code, told.stderr.splitlines()[0]) == (2, "--within: must be longer than 0")


@pytest.mark.slow
def test_this_machine_without_torch_in_the_command() -> None:
    """Two interpreters with torch; the command itself has none."""
    found = imported("probe", "--local", "2", "--json")
    assert not found & HEAVY


@pytest.mark.parametrize("within", ["0s", "0m"])
def test_no_time_at_all_is_no_limit_for_a_look(shell: Shell, within: str) -> None:
    told = shell("probe", "--local", "1", "--within", within)
    assert told.exit_code == 2
    assert "--within" in told.stderr


def test_a_job_of_its_own_is_no_step_of_the_allocation_that_asks_for_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []

    def look_at(place: object, *, environ: dict[str, str], **_: object) -> ProbeResult:
        given.append(environ)
        return looked(report(0))

    monkeypatch.setattr("slurm_forge.launch.diagnose.node_probe.look_at", look_at)
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CONF"):
        monkeypatch.setenv(name, "7")
    assert shell("probe", "--nodes", "2").exit_code == 0
    assert [name for name in given[0] if name.startswith("SLURM_")] == ["SLURM_CONF"]


def test_what_a_job_was_submitted_with_does_not_keep_the_channel_from_its_nodes(
    tmp_path: Path,
) -> None:
    """sbatch --export=NONE leaves that word for every srun inside of the job."""
    told = tmp_path / "told"
    words = (
        sys.executable,
        "-c",
        f"import os; open({str(told)!r}, 'w').write(os.environ[{_NAME!r}])",
    )
    found = look_at(
        ProbeTarget(commands=(words,), world=1),
        within=timedelta(seconds=5),
        start_within=timedelta(seconds=60),
        environ={_NAME: "NONE"},
    )
    assert found.measured is None
    assert told.read_text() == "ALL"
