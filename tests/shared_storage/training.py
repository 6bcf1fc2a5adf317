"""Ranks that train in the shared folder: ``python -m tests.shared_storage.training FOLDER STEP``.

Up to STEP, and beside their checkpoint they leave what ``torch.save`` and DCP write.  With ``end``
they wait for that and resume there; what they end with is compared with a run that nothing stopped.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from slurm_forge.checkpoint.export.export_files import Format
from slurm_forge.checkpoint.export.main import export, run_source
from slurm_forge.files import exists_on_server
from slurm_forge.run_directory import RunDirectory
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.testing.digest import digest
from slurm_forge.training.rank.main import RankOutcome
from tests.distributed import launches
from tests.distributed.launches import Gate
from tests.distributed.test_resume_ranks import STEPS, Part, begin, program

_LOCAL = Path("/dev/shm")  # this node alone
_PATIENCE_S = 1800.0
_EARLIER = torch.arange(300_000, dtype=torch.float32)


def train(run: RunDirectory, until: int | None) -> str:
    """Two ranks, up to a step or to the end; what is wrong about how they ended."""
    gate = Gate()
    part = Part(2, until=until)
    with (
        mock.patch.object(launches, "_LONG_S", _PATIENCE_S),  # of a machine that is emulated
        launches.launched(run, part.ranks, program(part, gate, random_model=True)) as launch,
    ):
        if until is not None:
            launch.at(gate, 1)
            launch.stop_together()
            gate.open()
    gate.close()
    wanted = (RankOutcome.FINISHED, STEPS) if until is None else (RankOutcome.STOPPED, until)
    found = {(each.outcome, each.step) for each in launch.told}
    return "" if found == {wanted} else f"ended with {found}"


def leave(folder: Path) -> None:
    """What torch itself writes."""
    torch.save({"tensor": _EARLIER}, folder / "earlier.pt")
    dcp.save({"tensor": _EARLIER}, checkpoint_id=folder / "earlier-dcp")


def wait_for(path: Path) -> None:
    """Until the other node has made it: importing torch takes minutes in a slow machine."""
    deadline = time.monotonic() + _PATIENCE_S
    while not exists_on_server(path):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.5)


def compare(folder: Path, run: RunDirectory) -> list[str]:
    """What was left by the other node, what came of the run, and what is exported of it."""
    problems = []
    read = {"tensor": torch.zeros_like(_EARLIER)}
    dcp.load(read, checkpoint_id=folder / "earlier-dcp")
    saved = torch.load(folder / "earlier.pt", weights_only=True)
    for kind, tensors in (("dcp.save", read), ("torch.save", saved)):
        if not torch.equal(tensors["tensor"], _EARLIER):
            problems.append(f"what {kind} wrote is read otherwise")
    # One case after another trains here, each with another mount.
    with tempfile.TemporaryDirectory(prefix="training-", dir=_LOCAL) as alone:
        whole = begin(Path(alone), "whole")
        problems.append(train(whole, None))
        if digest(run.path, random=True) != digest(whole.path, random=True):
            problems.append("it ends otherwise than a run that nothing stopped")
    store = CheckpointStore(run.checkpoints, run.name)
    weights = torch.load(run.path / "weights.pt", weights_only=True)
    for kind in Format:
        source = run_source(store, store.candidates()[0], only=(), everything=False)
        done = export(source, folder / f"weights-{kind.value}", kind, force=False)
        if done.tensors < len(weights):
            problems.append(f"{done.tensors} of {len(weights)} tensors exported as {kind.value}")
    return problems


def main(folder: Path, until: str) -> int:
    """Print what is wrong, a line each."""
    if until != "end":
        run = begin(folder, "parts")
        problems = [train(run, int(until))]
        leave(folder)
        (folder / "left").touch()
    else:
        wait_for(folder / "left")
        run = RunDirectory.existing(folder / "parts")
        problems = [train(run, None), *compare(folder, run)]
    for problem in filter(None, problems):
        print(f"problem: {problem}")
    print("trained")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
