"""From nothing to a run that was preempted and is finished, by what a new user types."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PLAIN = "--name demo --yes --nodes 2 --cpus-per-task 1 --mem 1500M --time 20m --partition preempt"


def typed(folder: Path, line: str, variables: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("way", ["job", "submitit", "exec", "attach"])
def test_init_submit_preempted_finished(slurm: SlurmCluster, tmp_path: Path, way: str) -> None:
    tools = Path(sys.executable).parent
    variables = {
        **slurm.env,
        "PATH": f"{tools}{os.pathsep}{slurm.env.get('PATH', os.environ['PATH'])}",
        "HOME": str(tmp_path),
        "SLURM_FORGE_NODES": "off",
        "OMP_NUM_THREADS": "1",
    }
    folder = tmp_path / "demo"
    out = typed(tmp_path, f"slurm-forge init demo --way {way} {PLAIN}", variables)
    # Slow enough to be preempted in the middle: the one change that is made by hand.
    for name in ("train.yaml", "train.py", "submit.py"):
        if (folder / name).exists():
            text = (folder / name).read_text()
            text = re.sub(r"(\bpace(?:\"?: |=))0\.0", r"\g<1>0.05", text)
            if name == "train.py" and way == "exec":
                text = text.replace('"--pace", type=float, default=0.0', '"--pace", default=0.05')
            (folder / name).write_text(text)
    (line,) = (line for line in out.splitlines() if line.endswith("# on the cluster"))
    told = typed(folder, line.partition("#")[0], variables)
    job = re.search(r"job (\d+)", told)
    assert job, told

    def run() -> RunDirectory | None:
        found = [*(folder / "runs").glob("demo*"), *(folder / "logs" / "runs").glob("demo*")]
        made = [each for each in found if (each / "run.yaml").is_file()]
        return RunDirectory.existing(made[0]) if made else None

    def state() -> RunState:
        found = run()
        return RunState() if found is None else run_state(found)

    def on_its_way() -> bool:
        launches = [launch for attempt in state().attempts for launch in attempt.launches]
        if way == "exec":
            return any("saved" in log.read_text() for log in folder.glob("demo-*.out"))
        return any((launch.step or 0) > 0 for launch in launches)

    slurm.wait_for(on_its_way, 90, "the first steps")
    slurm.preempt(job[1])
    slurm.wait_for(lambda: state().status is RunStatus.FINISHED, 120, "the end of the run")
    attempts = state().attempts
    assert len(attempts) == 2
    assert [cause.cause for _, cause in attempts[0].incidents] == [Cause.PREEMPTED]
    found = run()
    assert found is not None
    story = typed(folder, f"slurm-forge explain {found.path}", variables)
    assert "preempted" in story
    assert "finished" in story
