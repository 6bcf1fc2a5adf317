"""``slurm_forge.attach`` without Slurm: by torchrun, plainly, and under ``slurm-forge exec``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_forge.journal import RunStatus
from slurm_forge.launch.attach import STOPPED
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.vocabulary.cause import Cause
from tests.strange import not_understood, strange_task

pytestmark = [pytest.mark.distributed]

REPOSITORY = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")

HEAD = "import os, sys, slurm_forge as forge\n"


class Scripts:
    """Scripts in a folder of their own, and the runs that they make there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        settings = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env={**environment, **settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, *words: str, **variables: str) -> tuple[int, str]:
        process = self.start(*words, **variables)
        out, _ = process.communicate(timeout=100)
        return process.returncode, out

    def write(self, text: str) -> str:
        path = self.folder / "script.py"
        path.write_text(HEAD + text)
        return str(path)

    def run(self, name: str) -> RunDirectory:
        return RunDirectory.at(self.folder / "runs" / name)


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def attached(steps: int, pace: float) -> tuple[str, ...]:
    return (str(REPOSITORY / "tests" / "attached.py"), str(steps), str(pace))


def test_stopped_and_started_again(scripts: Scripts) -> None:
    process = scripts.start(*attached(60, 0.05))
    run = scripts.run("attached")
    deadline = time.monotonic() + 60
    while (run_state(run).committed_step or 0) < 20 if run.spec_file.is_file() else True:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED
    assert "behind the block" not in out
    code, out = scripts(*attached(60, 0))
    assert (code, "behind the block on rank 0" in out) == (0, True), out
    assert [a.outcome for a in run_state(run).attempts] == ["requeued", "finished"]
    assert run_state(run).attempts[1].launches[0].resumed.step > 0
    code, out = scripts(*attached(60, 0))
    assert (code, "behind the block" in out) == (0, False), "a finished run was trained again"


def test_the_default_group_of_the_script(scripts: Scripts) -> None:
    """Used where it has all ranks; exec claims the attempt, and the script does not again."""
    script = scripts.write(
        """
import torch, torch.distributed as dist
from tests.jobs import train
dist.init_process_group("gloo")
mine = dist.group.WORLD
with forge.attach(spec={"args": {"steps": 10}}) as run:
    assert dist.group.WORLD is mine
    train(run)
value = torch.ones(1)
dist.all_reduce(value)
print(f"after {run.name}: {value.item():.0f}", flush=True)
"""
    )
    exec_ = ("-m", "slurm_forge.cli.main", "exec", "--name", "own", "--", sys.executable)
    code, out = scripts(*exec_, *TORCHRUN, script)
    assert code == 0, out
    assert out.count("after own: 2") == 2
    state = run_state(scripts.run("own"))
    assert (state.status, len(state.attempts)) == (RunStatus.FINISHED, 1)
    assert state.attempts[0].launches[0].resumed is not None


def test_what_is_refused(scripts: Scripts) -> None:
    script = scripts.write(
        """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
os.environ.update(RANK="0", WORLD_SIZE="2", TORCHELASTIC_RUN_ID="x")
try:
    forge.attach("own").__enter__()
finally:
    sys.stdout.flush()
"""
    )
    code, out = scripts(script)
    assert code in (1, STOPPED)
    assert "torch.distributed is initialised as rank 0 of 1, and this is rank 0 of 2" in out
    script = scripts.write("forge.attach('other').__enter__()\n")
    exec_ = ("-m", "slurm_forge.cli.main", "exec", "--name", "mine", "--", sys.executable)
    code, out = scripts(*exec_, script)
    assert code == 1
    assert 'slurm_forge.attach("other"), but slurm-forge exec runs "mine"' in out


def test_an_exception_is_told(scripts: Scripts) -> None:
    script = scripts.write(
        """
with forge.attach("own", spec={"args": {"steps": 10}}) as run:
    raise KeyError("where is it")
print("behind the block")
"""
    )
    code, out = scripts(script)
    assert "behind the block" not in out
    assert "KeyError: 'where is it'" in out
    incident = run_state(scripts.run("own")).attempts[0].incidents[0][1]
    assert incident.cause is Cause.APP_ERROR
    assert code in (1, STOPPED)


@pytest.mark.slow
def test_what_is_not_understood_of_slurm_is_noted(scripts: Scripts) -> None:
    code, out = scripts(*attached(3, 0), **strange_task())
    assert code == 0, out
    assert not_understood(scripts.run("attached")) == ["SLURM_JOB_END_TIME='tomorrow'"]


def test_what_can_not_be_attached_is_told_before_anything_is_claimed(tmp_path: Path) -> None:
    scripts = Scripts(tmp_path)
    in_thread = """
import threading
def work():
    with forge.attach("x"):
        pass
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    _, out = scripts(scripts.write(in_thread))
    assert "attach() in a thread" in out
    code, out = scripts("-c", "import slurm_forge\nwith slurm_forge.attach(): pass")
    assert code == 1 and 'Give it one: slurm_forge.attach("my-run")' in out
    assert not (tmp_path / "runs").exists()
