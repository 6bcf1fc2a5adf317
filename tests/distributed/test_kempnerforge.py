"""KempnerForge's own training script as a run: interrupted, and equal; a bad gradient is left out.

It needs KempnerForge's checkout on the path (PYTHONPATH); it is on no package index.  The script
itself needs GPUs: ``kempnerforge/distributed/setup.py`` calls ``torch.cuda.set_device`` and builds
its mesh for "cuda".  Here both are told otherwise; all else is KempnerForge's.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slurm_forge as forge
from slurm_forge.errors import UnsupportedError
from slurm_forge.journal import fold, read_to_fold
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.rank.main import RankOutcome
from tests.distributed.launches import Gate, launched, new_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
if find_spec("kempnerforge") is None:
    pytest.skip("needs a checkout of KempnerForge on PYTHONPATH", allow_module_level=True)

STEPS = 6
WORDS = (
    "--model.dim=32", "--model.n_layers=2", "--model.n_heads=2", "--model.n_kv_heads=2",
    "--model.vocab_size=64", "--model.max_seq_len=16", "--train.seq_len=16",
    "--train.batch_size=2", f"--train.max_steps={STEPS}", "--train.mixed_precision=fp32",
    "--scheduler.warmup_steps=2", "--data.num_workers=0", "--data.pin_memory=false",
    "--metrics.log_interval=1", "--train.nccl_health_check_interval=2",
)  # fmt: skip


def top() -> Path:
    import kempnerforge

    return Path(kempnerforge.__file__).parents[1]


def train_kempnerforge(
    before: Callable[[forge.Run], None], data: Path
) -> Callable[[forge.Run], None]:
    def train(run: forge.Run) -> None:
        from kempnerforge.distributed import setup
        from kempnerforge.metrics import tracker

        from slurm_forge.integrations.kempnerforge import train_script

        mesh = setup.init_device_mesh
        setup.torch.cuda.set_device = lambda _: None
        setup.init_device_mesh = lambda device_type, **rest: mesh("cpu", **rest)
        start = tracker.MetricsTracker.start_step

        def start_step(self: Any) -> None:
            start(self)
            before(run)

        tracker.MetricsTracker.start_step = start_step
        words = [str(top() / "configs/train/debug.toml"), *WORDS, f"--data.dataset_path={data}"]
        words.append(f"--checkpoint.dir={run.directory / 'own'}")
        train_script(run, top() / "scripts/train.py", words)

    return train


def nothing(run: forge.Run) -> None:
    """Before a step that is not disturbed."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Tokens as KempnerForge reads them.  Without any it draws the same at random on all ranks."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    tokens = np.random.default_rng(1).integers(0, 64, 17 * 40, dtype=np.uint16)
    np.save(folder / "a.npy", tokens)
    return folder


def finished(run: RunDirectory, data: Path) -> None:
    with launched(run, 2, train_kempnerforge(nothing, data)) as launch:
        pass
    assert [(told.outcome, told.step) for told in launch.told] == [
        (RankOutcome.FINISHED, STEPS)
    ] * 2


def test_kempnerforge_s_script_is_interrupted_and_ends_the_same(
    tmp_path: Path, gate: Gate, data: Path
) -> None:
    undisturbed, run = (
        new_run(tmp_path, name=name, checkpoint={"every_steps": 2})
        for name in ("undisturbed", "stopped")
    )

    def before(run: forge.Run) -> None:
        if run.attempt == 1 and run.step_number == 3:
            gate.wait(run.rank)

    with launched(run, 2, train_kempnerforge(before, data)) as launch:
        launch.at(gate, 2)
        launch.stop_together()
        gate.open()
    assert {(told.outcome, told.step) for told in launch.told} == {(RankOutcome.STOPPED, 4)}
    for each in (run, undisturbed):
        finished(each, data)
        assert not (each.path / "own").exists(), "KempnerForge has saved"
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)


def test_a_gradient_of_kempnerforge_s_that_is_not_finite_reaches_no_weight(
    tmp_path: Path, data: Path
) -> None:
    run = new_run(tmp_path, name="nan", checkpoint={"every_steps": 2}, inject=["nan@3"])
    finished(run, data)
    assert [step for each in fold(read_to_fold(run)).attempts for step in each.skipped]


def test_what_can_not_be_a_run_is_refused_before_anything_is_built() -> None:
    from slurm_forge.integrations import kempnerforge

    with pytest.raises(UnsupportedError, match="has no load_config"):
        kempnerforge.train_script(object(), __file__, [])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="with pipeline parallelism"):
        words = [str(top() / "configs/train/debug.toml"), "--distributed.pp=2"]
        kempnerforge.train_script(object(), top() / "scripts/train.py", words)  # type: ignore[arg-type]
    assert not torch.distributed.is_initialized()
