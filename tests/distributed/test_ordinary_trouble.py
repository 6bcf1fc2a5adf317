"""Surroundings that are not as usual: each ends in a run that is finished, or in a clear message.

``docs/how-to/ordinary-trouble.md`` has the table.  A mount is made in a namespace of its own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed]

TRAIN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import slurm_forge as forge

def train(run):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(64, 4))
    for batch in run.batches(data, global_batch_size=8, until=forge.Steps(3)):
        run.train_step(batch, lambda micro: model(micro[0]).square().mean())
"""
JOB = """name: tiny
entry: train.py:train
probe: {enabled: false}
recovery: {storage: [{do: hold}]}
resources: {tasks_per_node: 2}
"""
LONG = "/".join(["Läufe mit Leerzeichen, 実験 " + "x" * 40] * 3)


@dataclass(frozen=True)
class Trouble:
    """What is unusual.

    ``before`` is shell that is executed first, ``mounts`` whether that needs a namespace; ``says``
    are words of the end of the command, where it is not a finished run.
    """

    before: str = ""
    mounts: bool = False
    place: str = "work"
    env: dict[str, str | None] = field(default_factory=dict)
    status: int = 0
    says: tuple[str, ...] = ("finished at step 3",)


ASCII_ONLY = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
TROUBLES = {
    "address space": Trouble("ulimit -v 8000000"),
    "too little address space": Trouble(
        "ulimit -v 600000", status=1, says=("failed to map segment", "held")
    ),
    "no shared memory": Trouble("mount -t tmpfs -o ro,size=4k none /dev/shm", mounts=True),
    "little shared memory": Trouble("mount -t tmpfs -o size=64k none /dev/shm", mounts=True),
    "no home": Trouble(env={"HOME": None}),
    "a home that is missing": Trouble(env={"HOME": "/nonexistent/home"}),
    "a home that is read-only": Trouble("mount -t tmpfs -o ro none home", mounts=True),
    "locale C": Trouble(place="Läufe 実験", env={"LC_ALL": "C"}),
    "a locale without Unicode": Trouble(
        place="Läufe 実験", env=ASCII_ONLY, status=2, says=("not UTF-8", "LC_ALL=C.UTF-8")
    ),
    "a long path": Trouble(place=LONG),
    "no TMPDIR": Trouble(env={"TMPDIR": "/nonexistent/tmp"}),
    "a TMPDIR that is read-only": Trouble("mount -t tmpfs -o ro none tmp", mounts=True),
    "standard input closed": Trouble("exec 0<&-"),
    "umask 000": Trouble("umask 000"),
    "umask 002": Trouble("umask 002"),
    "umask 077": Trouble("umask 077"),
    "a folder that is read-only": Trouble(
        "mount -t tmpfs none runs && mount -o remount,ro runs",
        mounts=True,
        status=2,
        says=("Read-only file system", "--runs DIR"),
    ),
    "no inodes": Trouble(
        "mount -t tmpfs -o nr_inodes=4 none runs",
        mounts=True,
        status=2,
        says=("No space left", "df -i", "--runs DIR"),
    ),
    "few inodes": Trouble(
        "mount -t tmpfs -o nr_inodes=12 none runs",
        mounts=True,
        status=1,
        says=("No space left", "ended before they began an attempt", "slurm-forge run"),
    ),
    "inodes for no checkpoint": Trouble(
        "mount -t tmpfs -o nr_inodes=24 none runs",
        mounts=True,
        status=1,
        says=("no room for", "held", "check quota and free space"),
    ),
    "no room": Trouble(
        "mount -t tmpfs -o size=64k none runs",
        mounts=True,
        status=1,
        says=("no room for a checkpoint", "held", "check quota and free space"),
    ),
    "no room at all": Trouble(
        "mount -t tmpfs -o size=4k none runs",
        mounts=True,
        status=2,
        says=("No space left", "Make room", "--runs DIR"),
    ),
}
#: Of each class one, which starts no ranks where that is enough.
IN_CI = {"a locale without Unicode", "no inodes", "a long path"}
EACH = [
    pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow, id=name)
    for name in TROUBLES
]


def can_mount() -> bool:
    words = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(words, check=False, capture_output=True, timeout=20).returncode == 0


@pytest.mark.parametrize("name", EACH)
def test_it_ends_well_or_says_what_to_do(tmp_path: Path, name: str) -> None:
    trouble = TROUBLES[name]
    if trouble.mounts and not can_mount():
        pytest.skip("needs a mount namespace")
    place = tmp_path / trouble.place
    for each in ("home", "tmp", "runs"):
        (place / each).mkdir(parents=True)
    (place / "train.py").write_text(TRAIN)
    (place / "job.yaml").write_text(JOB)
    command = shlex.join([sys.executable, "-m", "slurm_forge"])
    script = f"{trouble.before or 'true'} || exit 99\n{command} run job.yaml"
    shown = f"{command} status tiny; {command} explain tiny"
    env: dict[str, str | None] = {
        **os.environ,
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "LC_ALL": "C.UTF-8",
        **trouble.env,
    }
    words = ["bash", "-c", f"{script}\nstatus=$?\n{shown}\nexit $status"]
    done = subprocess.run(
        ["unshare", "-m", *words] if trouble.mounts else words,
        check=False,
        cwd=place,
        env={key: value for key, value in env.items() if value is not None},
        capture_output=True,
        timeout=240,
    )
    said = " ".join((done.stdout + done.stderr).decode(errors="replace").split())
    assert done.returncode == trouble.status, said
    for words_said in trouble.says:
        assert words_said in said, (words_said, said)
    if trouble.status != 1 or name != "few inodes":  # where submitit itself is refused a file
        assert "Traceback" not in said, said
