"""A run on a file system that has room for its last checkpoint and for little else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import slurm_forge as forge
from slurm_forge.cli.observe.run_reading import gather
from slurm_forge.journal import RunState, RunStatus, read_journal
from slurm_forge.journal.events import CheckpointFailed, CheckpointsPruned, Note
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.store.room import FreeSpace
from slurm_forge.training.checkpointing import retention as housekeeping

pytestmark = [pytest.mark.distributed]

STEPS = 6
#: In a mount namespace of its own, the small file system goes away with the command.
NAMESPACE = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
COMMAND = """
mount -t tmpfs -o size="$4" tmpfs "$1" || exit 99
"$2" -m slurm_forge.cli.main run job.yaml --runs "$1"
code=$?
cp -r "$1/." "$3"
exit $code
"""


def train(run: forge.Run) -> None:
    """Its checkpoints take 4 MiB each."""
    model: nn.Module = nn.Linear(1024, 1024)
    if run.world_size > 1:
        model = DistributedDataParallel(model)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(64, 1024))
    for batch in run.batches(data, global_batch_size=8, until=forge.Steps(STEPS)):
        run.train_step(batch, lambda micro: model(micro[0]).square().mean())


def train_under_quota(run: forge.Run) -> None:
    """Where the limit is a quota, what is free on the file system says nothing of it."""
    housekeeping.free_space = lambda directory: FreeSpace(None, None)
    train(run)


def trained(
    tmp_path: Path, entry: str, size: str, checkpoint: str, *, ranks: int = 1
) -> RunDirectory:
    """A run that has finished on a file system of that size."""
    small, kept = tmp_path / "small", tmp_path / "kept"
    small.mkdir(mode=0o700)
    kept.mkdir(mode=0o700)
    (tmp_path / "job.yaml").write_text(
        f"name: tight\nentry: {__file__}:{entry}\nprobe: {{enabled: false}}\n"
        f"checkpoint: {checkpoint}\nresources: {{tasks_per_node: {ranks}}}\n"
    )
    ended = subprocess.run(
        [*NAMESPACE, "sh", "-c", COMMAND, "sh", str(small), sys.executable, str(kept), size],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return RunDirectory.at(kept / "tight")


@pytest.mark.parametrize(
    ("entry", "failed"),
    [
        ("train", []),
        # Where that is known only while it is written, the first save fails.
        pytest.param("train_under_quota", [2], marks=pytest.mark.slow),
    ],
)
def test_what_the_run_directory_has_no_room_for_goes_to_the_fallback(
    tmp_path: Path, entry: str, failed: list[int]
) -> None:
    other = tmp_path / "other"
    run = trained(tmp_path, entry, "3m", f"{{every_steps: 2, keep_last: 9, fallback: {other}}}")
    saved = [2, 4, 6]
    assert commits(run_state(run)) == [step for step in saved if step not in failed]
    (folder,) = other.iterdir()
    store = read_run_file(run.spec_file).open_store(run)
    assert {store.path(name).parent for name in store.candidates()} == {folder}
    for name in store.candidates():
        store.verify_manifest(name)
    records, _ = read_journal(run)
    notes = [record.event.text for record in records if isinstance(record.event, Note)]
    assert [text for text in notes if str(folder) in text] != []
    assert not [each for each in records if isinstance(each.event, CheckpointsPruned)]
    assert gather(run).on_disk == frozenset(store.candidates()), "status would miss them"


def commits(state: RunState) -> list[int]:
    """The steps that the only attempt of a finished run has saved."""
    assert state.status is RunStatus.FINISHED
    (attempt,) = state.attempts
    return [commit.step for _, commit in attempt.checkpoints]


def test_the_last_save_takes_the_room_that_others_left_and_no_step_is_trained_again(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, "train", "7m", "{every_steps: 2}")
    assert commits(run_state(run)) == [STEPS], "the others left it free"


@pytest.mark.parametrize(
    ("ranks", "background", "saved"),
    [
        pytest.param(2, "false", [1, 2, 3, 4, 5, 6], marks=pytest.mark.slow),
        (1, "true", [1, 2, 3, 5, 6]),
    ],
)
def test_under_a_quota_old_checkpoints_make_room(
    tmp_path: Path, ranks: int, background: str, saved: list[int]
) -> None:
    """Room for three and a half, and the job wants three: the fourth finds that out."""
    checkpoint = f"{{every_steps: 1, keep_last: 3, good_after_steps: 1, background: {background}}}"
    run = trained(tmp_path, "train_under_quota", "14m", checkpoint, ranks=ranks)
    assert commits(run_state(run)) == saved
    records, _ = read_journal(run)
    failed = [record.event for record in records if isinstance(record.event, CheckpointFailed)]
    assert [event.step for event in failed] == [4]
    assert "No space left on device" in failed[0].reason
