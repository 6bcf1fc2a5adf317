"""The shield's process, without Slurm: what it hears, what it passes on, what it leaves behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_forge.control.agent_hub import AgentsHub
from slurm_forge.errors import ForgeError
from slurm_forge.knobs import Knobs
from slurm_forge.launch.supervisor.signal_shield import (
    filled,
    variables_for,
)
from slurm_forge.slurm.environment import SlurmEnvironment

WITHIN_S = 90.0
STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_PROCID": "1", "SLURM_NTASKS": "2",
    "SLURMD_NODENAME": "n2",
}  # fmt: skip
MEETING = {"MASTER_ADDR": "n1", "MASTER_PORT": "20123"}


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def _head(folder: Path) -> str:
    imports = "import os, signal, subprocess, sys, time\nfrom pathlib import Path"
    return f"{imports}\nF = Path({str(folder)!r})\n"


@contextmanager
def shield(
    program: str, *options: str, folder: Path, environ: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The shield over a Python program, which sees ``folder`` and notes who and what it is."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "slurm_forge.process", "shield", *options, "--",
            sys.executable, "-c", _head(folder) + textwrap.dedent(program),
        ],
        env={**os.environ, **(environ or {})},
    )  # fmt: skip
    try:
        yield process
    finally:
        (folder / "go").touch()  # ranks lead sessions of their own, and must not outlive a failure
        process.kill()
        process.wait()


#: Takes signals down, until it may go.
LISTENS = """
    def heard(number, _):
        with open(F / "heard", "a") as file:
            file.write(signal.Signals(number).name + "\\n")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, heard)
    (F / "new").write_text(str(os.getpid()))
    (F / "new").rename(F / "pid")
    while not (F / "go").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit(0)", 0),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_it_ends_as_the_command_does(program: str, status: int, tmp_path: Path) -> None:
    with shield(program, folder=tmp_path) as process:
        assert process.wait(WITHIN_S) == status


def test_what_can_not_be_started_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slurm_forge.process", "shield", "--", "/no/such/program"],
        capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 127
    assert "/no/such/program can't be started: No such file or directory" in done.stderr


def test_signals_are_told_and_go_no_further(tmp_path: Path) -> None:
    heard: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    hub = AgentsHub(world_size=2, on_notice=lambda task, what: heard.put((task, what)))
    try:
        knobs = Knobs(
            shields=hub.addresses,
            shields_nonce=hub.credentials.nonce,
            secret=hub.credentials.secret,
        )
        environ = {**STEP, **knobs.to_environ()}
        with shield(LISTENS, folder=tmp_path, environ=environ) as process:
            wait_for((tmp_path / "pid").exists, "the program listens")
            for name in ("SIGTERM", "SIGUSR2", "SIGTERM"):
                process.send_signal(signal.Signals[name])
                assert heard.get(timeout=WITHIN_S) == (1, name)
            assert hub.agents()[1].host == "n2"
            (tmp_path / "go").touch()
            assert process.wait(WITHIN_S) == 0
        assert not (tmp_path / "heard").exists()
    finally:
        hub.close()


def test_what_starts_the_ranks_outlives_a_slurm_that_signals_everybody(tmp_path: Path) -> None:
    """A launcher without handlers would die of it, and its ranks before they have saved."""
    plain = LISTENS.replace("signal.signal(number, heard)", "pass")
    with shield(plain, folder=tmp_path) as process:
        wait_for((tmp_path / "pid").exists, "the program is there")
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        (tmp_path / "go").touch()
        assert process.wait(WITHIN_S) == 0


def test_what_is_passed_on_reaches_the_ranks_and_not_their_launcher(tmp_path: Path) -> None:
    """As below torchrun: the ranks lead sessions of their own, their helpers don't."""
    (tmp_path / "rank.py").write_text(_head(tmp_path) + textwrap.dedent(LISTENS))
    program = """
        signal.signal(signal.SIGUSR1, lambda *_: (F / "launcher-heard").touch())
        rank = subprocess.Popen([sys.executable, str(F / "rank.py")], start_new_session=True)
        sys.exit(rank.wait())
    """
    with shield(program, "--pass=SIGUSR1", folder=tmp_path) as process:
        wait_for((tmp_path / "pid").exists, "the rank listens")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
        wait_for((tmp_path / "heard").exists, "the rank hears")
        (tmp_path / "go").touch()
        assert process.wait(WITHIN_S) == 0
    assert (tmp_path / "heard").read_text().split() == ["SIGUSR1"]
    assert not (tmp_path / "launcher-heard").exists()


#: Starts something in a session of its own, which outlives it.
LEAVES = """
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (F / "left").write_text(str(left.pid))
    (F / "pid").write_text(str(os.getpid()))
"""


def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    with shield(LEAVES, folder=tmp_path) as process:
        assert process.wait(WITHIN_S) == 0
        left = int((tmp_path / "left").read_text())
        assert not alive(left)


def test_with_the_shield_goes_its_command(tmp_path: Path) -> None:
    with shield(LISTENS, folder=tmp_path) as process:
        wait_for((tmp_path / "pid").exists, "the program is there")
        process.kill()
        wait_for(lambda: not alive(int((tmp_path / "pid").read_text())), "it goes")


def test_only_whole_words_are_filled_in() -> None:
    environment = SlurmEnvironment.from_environ(STEP)
    words = ["torchrun", "--nnodes={nnodes}", "--node-rank={node_rank}", "x={nnodes}", '{"a": 1}']
    more = ["--master-addr={master_addr}", "--master-port={master_port}"]
    assert filled([*words, *more], environment, MEETING) == (
        *("torchrun", "--nnodes=2", "--node-rank=1", "x={nnodes}", '{"a": 1}'),
        *("--master-addr=n1", "--master-port=20123"),
    )
    with pytest.raises(ForgeError, match="no value known for --master-addr="):
        filled(more, environment, {})


def test_ranks_are_torchruns_to_number_in_this_step_alone() -> None:
    environment = SlurmEnvironment.from_environ(STEP)
    torchrun = ["python", "--node-rank={node_rank}"]
    ours = variables_for(torchrun, environment, {}, of_shield=True)
    assert Knobs.from_environ(ours).torchrun == "7.3"
    assert ours["PET_SIGNALS_TO_HANDLE"] == "SIGINT"
    theirs = variables_for(torchrun, environment, {}, of_shield=False)
    assert Knobs.from_environ(theirs).torchrun == "7.3"
    assert not [name for name in theirs if name.startswith("PET_")]
    assert variables_for(["apptainer", "x"], environment, {}, of_shield=True) == {}


def test_a_container_that_forgets_the_host_is_told_what_ranks_need() -> None:
    given = {"SLURM_PROCID": "1", "SLURM_FORGE_NONCE": "n", "HOME": "/home/me", "MASTER_ADDR": "a"}
    for program, prefix in (("apptainer", "APPTAINERENV_"), ("/o/singularity", "SINGULARITYENV_")):
        found = variables_for([program, "exec", "--cleanenv", "i"], None, given, of_shield=True)
        added = {name for name in found if name.startswith(prefix)}
        assert added == {f"{prefix}{name}" for name in given if name != "HOME"}
        assert variables_for([program, "exec", "i"], None, given, of_shield=True) == given
