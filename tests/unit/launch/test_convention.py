"""Which signal goes to whom, by what is said and by what a command looks like."""

from __future__ import annotations

import pytest

from slurm_forge.launch.command.program_process import (
    ProcessEntry,
    ProcessesBelow,
    below,
)
from slurm_forge.launch.render.signal_convention import (
    Forwarding,
    forwarding,
)
from slurm_forge.spec.launchers import Convention, NotifyTo, ProgramSpec

TERM, USR1, USR2 = "SIGTERM", "SIGUSR1", "SIGUSR2"


@pytest.mark.parametrize(
    ("options", "command", "expected"),
    [
        ({}, "python train.py", (TERM, NotifyTo.CHILD)),
        ({}, "srun python train.py", (TERM, NotifyTo.RANKS)),
        ({}, "/usr/bin/srun -n 8 train", (TERM, NotifyTo.RANKS)),
        ({}, "bash loop.sh", (TERM, NotifyTo.TREE)),
        ({}, "timeout 3h python train.py", (TERM, NotifyTo.TREE)),
        ({}, "torchrun --nproc-per-node 4 train.py", (TERM, NotifyTo.CHILD)),
        ({}, "python -m torch.distributed.run train.py", (TERM, NotifyTo.CHILD)),
        ({}, "python3.11 -X dev -u /venv/bin/torchrun train.py", (TERM, NotifyTo.CHILD)),
        # torchrun dies of what it does not handle, and passes nothing on.
        ({"notify": "USR1"}, "torchrun train.py", (USR1, NotifyTo.TREE)),
        ({"convention": "torchrun"}, "./mine", (TERM, NotifyTo.CHILD)),
        ({"convention": "torchrun"}, "srun torchrun train.py", (TERM, NotifyTo.RANKS)),
        ({"convention": "lightning"}, "srun python fit.py", (USR1, NotifyTo.RANKS)),
        ({"convention": "lightning"}, "torchrun fit.py", (USR1, NotifyTo.TREE)),
        ({"convention": "submitit"}, "python -m job", (USR2, NotifyTo.CHILD)),
        ({"convention": "hf"}, "srun python run_clm.py", (TERM, NotifyTo.RANKS)),
        ({"convention": "accelerate"}, "accelerate launch train.py", (TERM, NotifyTo.TREE)),
        ({"notify_to": "group"}, "python train.py", (TERM, NotifyTo.GROUP)),
        ({"convention": "lightning", "notify": "TERM"}, "python fit.py", (TERM, NotifyTo.CHILD)),
    ],
)
def test_forwarding(options: dict[str, str], command: str, expected: tuple[str, NotifyTo]) -> None:
    found = forwarding(ProgramSpec.model_validate(options), command.split())
    assert found == Forwarding(*expected)


def test_every_convention_is_documented() -> None:
    from tests.slurm.harness import REPOSITORY

    page = (REPOSITORY / "docs" / "how-to" / "exec.md").read_text()
    for convention in Convention:
        assert f"| `{convention.value}` |" in page


def processes(*lines: str) -> list[ProcessEntry]:
    """``"10 1 bash loop.sh"``: pid, parent, words."""
    found = []
    for line in lines:
        pid, parent, *words = line.split()
        found.append(ProcessEntry(int(pid), int(parent), tuple(words)))
    return found


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (["10 1 python train.py", "11 10 python worker"], ProcessesBelow((10,))),
        (["10 1 bash x.sh", "11 10 python train.py", "12 11 python worker"], ProcessesBelow((11,))),
        (["10 1 bash x.sh", "11 10 sleep 5"], ProcessesBelow((10,))),
        (["10 1 bash x.sh", "11 10 python a.py", "12 10 tee log"], ProcessesBelow((11,))),
        (
            ["10 1 torchrun t.py", "11 10 python t.py", "12 10 python t.py", "13 12 python t.py"],
            ProcessesBelow((11, 12)),
        ),
        (
            ["10 1 bash x.sh", "11 10 srun python t.py", "12 11 srun python t.py"],
            ProcessesBelow((), True),
        ),
        (["10 1 accelerate launch t.py"], ProcessesBelow((10,))),
        (["10 1 timeout 5 bash x.sh", "11 10 bash x.sh", "12 11 ./train"], ProcessesBelow((12,))),
        (["20 1 python other.py"], ProcessesBelow(())),
    ],
)
def test_who_is_below(table: list[str], told: ProcessesBelow) -> None:
    assert below(processes(*table), 10) == told
