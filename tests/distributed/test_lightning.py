"""Lightning's Trainer as a run: stopped, killed, given a NaN, and equal to an undisturbed one.

Where lightning is installed, as by the extra ``dev``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slurm_forge as forge
from slurm_forge.journal import fold, read_to_fold
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import Gate, launched, new_run
from tests.distributed.ranks import start_ranks

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy  # noqa: E402

from slurm_forge.integrations.lightning import ForgeCallback, ForgeEnvironment  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

RANKS, STEPS, SAMPLES = 2, 12, 40

Sample = tuple[torch.Tensor, torch.Tensor]
Disturb = Callable[[str, int], None]
#: What a test changes, by name: of Net, of the loader, and of the Trainer all the rest.
Options = dict[str, Any]


class Rows(torch.utils.data.Dataset[Sample]):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=draw), torch.tensor(index % 3)


class Stream(torch.utils.data.IterableDataset[Sample]):
    """The samples of a rank one after the other; ``short`` ends early the second time."""

    def __init__(self, run: forge.Run, *, short: bool = False) -> None:
        self.mine = range(run.rank, SAMPLES, run.world_size)[: 2 if short else None]

    def __iter__(self) -> Iterator[Sample]:
        return (Rows()[index] for index in self.mine)


class Batches:
    """Batches that no loader makes."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader(shuffle=False))


class StatefulStream(torch.utils.data.IterableDataset[Sample]):
    """A dataset with a position, for torchdata's StatefulDataLoader."""

    def __init__(self, run: forge.Run) -> None:
        self.mine, self.at = range(run.rank, SAMPLES, run.world_size), 0

    def __iter__(self) -> Iterator[Sample]:
        while self.at < len(self.mine):
            self.at += 1
            yield Rows()[self.mine[self.at - 1]]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Net(pl.LightningModule):  # type: ignore[misc,name-defined]
    """With dropout: the random state counts."""

    def __init__(self, disturb: Disturb, *, manual: bool = False, plateau: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
        self.accuracy = MulticlassAccuracy(3)
        self.disturb, self.plateau = disturb, plateau
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.body(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.disturb("step", self.trainer.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.disturb("validation", self.trainer.global_step)
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        self.log("val_loss", loss + torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            first, last = self.body[0].parameters(), self.body[3].parameters()
            return torch.optim.AdamW(first, lr=0.05), torch.optim.SGD(last, lr=0.05, momentum=0.9)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedules = torch.optim.lr_scheduler
        if self.plateau:
            by_loss = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return [optimizer], [{"scheduler": by_loss, "monitor": "loss_epoch"}]
        cosine = schedules.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


def nothing(where: str, step: int) -> None:
    """An undisturbed run."""


def trainer_of(folder: Path, ranks: int = RANKS, *, library: Any = pl, **options: Any) -> Any:
    values: Options = {
        "accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto",
        "max_steps": STEPS, "accumulate_grad_batches": 2, "val_check_interval": 3,
        "log_every_n_steps": 1, "default_root_dir": str(folder), "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, **options,
    }  # fmt: skip
    return library.Trainer(**values)


def loader(dataset: Any = None, *, stateful: bool = False, **options: Any) -> Any:
    if dataset is None:
        dataset = Rows()
    values: Options = {
        "batch_size": 2, "shuffle": not isinstance(dataset, torch.utils.data.IterableDataset),
        **options,
    }  # fmt: skip
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(dataset, **values)
    return torch.utils.data.DataLoader(dataset, **values)


def divided(run: forge.Run) -> Any:
    """A loader with a state, and the sampler that Lightning leaves as it is."""
    sampler = torch.utils.data.DistributedSampler(Rows(), run.world_size, run.rank)
    return loader(stateful=True, sampler=sampler, shuffle=None)


def fit(run: forge.Run, disturb: Disturb, options: Options) -> Any:
    # As in a job of Slurm, where Lightning would save and requeue by itself.
    os.environ.update({"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2"})
    torch.manual_seed(7)
    options = {name: each(run) if callable(each) else each for name, each in options.items()}
    net = {name: options.pop(name) for name in ("manual", "plateau") if name in options}
    data = options.pop("data") if "data" in options else loader()
    options.pop("ranks", None)
    callbacks = [*options.pop("callbacks", ()), ForgeCallback(run)]
    trainer = trainer_of(
        run.directory, run.world_size, plugins=[ForgeEnvironment(run)], callbacks=callbacks,
        **options,
    )  # fmt: skip
    trainer.fit(Net(disturb, **net), data, loader(Rows(8), shuffle=False))
    return trainer


def program(disturb: Disturb = nothing, **options: Any) -> Callable[[forge.Run], None]:
    def train(run: forge.Run) -> None:
        fit(run, disturb, options)

    return train


def run_of(folder: Path, name: str, **spec: Any) -> RunDirectory:
    return new_run(folder, name=name, checkpoint={"every_steps": 4}, **spec)


def finished(run: RunDirectory, ranks: int = RANKS, **options: Any) -> RunDirectory:
    with launched(run, ranks, program(**options)) as launch:
        pass
    assert {told.outcome for told in launch.told} == {RankOutcome.FINISHED}, launch.outcomes
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run that most tests compare with."""
    run = finished(run_of(tmp_path_factory.mktemp("runs"), "undisturbed"))
    return digest(run.path, random=True)


def stopped(
    run: RunDirectory, gate: Gate, where: str, step: int, ranks: int = RANKS,
    at: int | None = None, **options: Any,
) -> None:  # fmt: skip
    """Stop the run in a place, as Slurm does: by a signal to all ranks."""

    def disturb(here: str, now: int) -> None:
        if (here, now) == (where, step):
            gate.wait(0)

    with launched(run, ranks, program(disturb, **options)) as launch:
        launch.at(gate, ranks)
        for rank in range(ranks):
            launch.kill(rank, signal.SIGTERM)
        launch.heard()
        gate.open()
    if at is None:
        at = step // (2 if options.get("manual") else 1) + (where == "step")
    assert {(told.outcome, told.step) for told in launch.told} == {(RankOutcome.STOPPED, at)}


#: Behind a step; at the end of an epoch; in a validation.
@pytest.mark.parametrize(("where", "step"), [
    pytest.param("step", 6, marks=pytest.mark.slow), ("step", 4),
    pytest.param("validation", 3, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_stopped_trainer_loses_no_step_and_ends_the_same(
    tmp_path: Path, gate: Gate, undisturbed: str, where: str, step: int
) -> None:
    run = run_of(tmp_path, "stopped")
    stopped(run, gate, where, step)
    finished(run)
    assert digest(run.path, random=True) == undisturbed


@pytest.mark.slow
def test_between_accumulated_batches_is_no_place_to_stop(
    tmp_path: Path, gate: Gate, undisturbed: str
) -> None:
    run = run_of(tmp_path, "stopped")
    stopped(run, gate, "validation", 1, at=2)  # behind the third batch, and two make a step
    finished(run)
    assert digest(run.path, random=True) == undisturbed


@pytest.mark.slow
def test_a_killed_trainer_continues_from_its_last_checkpoint_and_ends_the_same(
    tmp_path: Path, gate: Gate, undisturbed: str
) -> None:
    run = run_of(tmp_path, "killed")

    def disturb(where: str, step: int) -> None:
        if (where, step) == ("step", 6):
            gate.wait(0)

    with launched(run, RANKS, program(disturb)) as launch:
        launch.kill_at(gate, RANKS)
    assert launch.decision is not None
    assert launch.decision.action is Action.RELAUNCH
    finished(run)
    assert digest(run.path, random=True) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "launches", "options"), [
    ("nan@5", 1, {}), ("nan@5x3", 2, {}), ("nan@5", 1, {"gradient_clip_val": 1.0}),
    ("nan@5", 1, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
])  # fmt: skip
def test_a_gradient_that_is_not_finite_reaches_no_weight(
    tmp_path: Path, fault: str, launches: int, options: Options
) -> None:
    run = run_of(tmp_path, "nan", inject=[fault])
    for _ in range(launches - 1):
        with launched(run, RANKS, program(**options)) as launch:
            pass
        assert launch.decision is not None
        assert launch.decision.action is Action.ROLLBACK
    finished(run, **options)
    assert [step for each in fold(read_to_fold(run)).attempts for step in each.skipped]


def weights_of(model: nn.Module) -> list[float]:
    return [value for each in model.parameters() for value in each.detach().flatten().tolist()]


def train_plainly(rank: int, folder: Path) -> list[float]:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)})
    torch.manual_seed(7)
    trainer, model = trainer_of(folder, limit_val_batches=0), Net(nothing)
    trainer.fit(model, loader())
    return weights_of(model)


@pytest.mark.slow
def test_the_weights_are_those_of_a_trainer_without_a_run(tmp_path: Path) -> None:

    def train(run: forge.Run) -> None:
        trainer = fit(run, nothing, {"limit_val_batches": 0})
        assert type(trainer.strategy.cluster_environment) is ForgeEnvironment
        weights = weights_of(trainer.lightning_module)
        (run.directory / f"weights-{run.rank}").write_text(json.dumps(weights))

    run = run_of(tmp_path, "run")
    with launched(run, RANKS, train) as launch:
        pass
    assert {told.outcome for told in launch.told} == {RankOutcome.FINISHED}
    with start_ranks(RANKS, train_plainly, tmp_path / "plain") as group:
        outcomes = group.wait(120)
    assert all(outcome.ok for outcome in outcomes), "".join(map(str, outcomes))
    for rank in range(RANKS):
        assert json.loads((run.path / f"weights-{rank}").read_text()) == outcomes[rank].value


# -- data, schedules and callbacks of all kinds ----------------------------------------------------


KINDS: dict[str, tuple[int, str, int, Options]] = {
    "workers": (2, "step", 6, {"data": lambda run: loader(num_workers=2)}),
    "workers that persist": (
        1, "step", 10, {"data": lambda run: loader(num_workers=1, persistent_workers=True)},
    ),
    "an order of the global generator": (1, "step", 10, {}),
    "an order of a generator of the program's": (
        1, "step", 10, {"data": lambda run: loader(generator=torch.Generator().manual_seed(1))},
    ),
    "an iterable": (2, "step", 6, {"data": lambda run: loader(Stream(run)), "max_epochs": 3}),
    "an iterable, in a validation": (
        2, "validation", 7, {"data": lambda run: loader(Stream(run)), "val_check_interval": 4},
    ),
    "an iterable that is no loader": (1, "step", 6, {"data": lambda run: Batches()}),
    "a loader with a state": (2, "step", 6, {"data": divided}),
    "a loader with a state, at the end of an epoch": (
        2, "step", 4, {"data": divided},
    ),
    "a loader with a state, an order of the global generator": (
        1, "step", 10, {"data": lambda run: loader(stateful=True)},
    ),
    "an iterable with a state": (
        2, "step", 6, {"data": lambda run: loader(StatefulStream(run), stateful=True)},
    ),
    "an iterable with a state, at the end of an epoch": (
        2, "step", 4, {"data": lambda run: loader(StatefulStream(run), stateful=True)},
    ),
    "an iterable with a state, in a validation": (
        2, "validation", 7,
        {"data": lambda run: loader(StatefulStream(run), stateful=True), "val_check_interval": 4},
    ),
    "two optimizers": (2, "step", 6, {"manual": True, "accumulate_grad_batches": 1}),
    "a schedule of the epoch's mean": (2, "step", 6, {"plateau": True}),
    "epochs": (2, "step", 6, {"max_steps": -1, "max_epochs": 3, "plateau": True}),
    "an early stop": (2, "step", 6, {
        "callbacks": lambda run: [EarlyStopping("val_loss", patience=1, mode="max")],
        "max_steps": 40, "min_steps": 10,
    }),
    "the Trainer's own checkpoints": (2, "validation", 3, {
        "enable_checkpointing": True,
        "callbacks": lambda run: [
            ModelCheckpoint(run.directory / "own", monitor="val_loss", save_top_k=2, save_last=True)
        ],
    }),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_ends_as_if_it_had_not_been_stopped(
    tmp_path: Path, gate: Gate, kind: str
) -> None:
    ranks, where, step, options = KINDS[kind]
    undisturbed = finished(run_of(tmp_path / "one", "run"), ranks, **options)
    run = run_of(tmp_path / "two", "run")
    stopped(run, gate, where, step, ranks, **options)
    finished(run, ranks, **options)
    own = [{path.name for path in (each.path / "own").glob("*")} for each in (run, undisturbed)]
    assert own[0] == own[1]
    if not own[0]:  # their paths are part of the state
        assert digest(run.path, random=True) == digest(undisturbed.path, random=True)


@pytest.mark.slow
def test_the_package_of_the_older_name_works_as_well(tmp_path: Path) -> None:

    def train(run: forge.Run) -> None:
        for name in [each for each in sys.modules if each.startswith("lightning.")]:
            del sys.modules[name]
        del sys.modules["slurm_forge.integrations.lightning"]
        import pytorch_lightning

        from slurm_forge.integrations import lightning

        class OldNet(pytorch_lightning.LightningModule):  # type: ignore[misc,name-defined]
            training_step, configure_optimizers = Net.training_step, Net.configure_optimizers

        model = OldNet()
        model.body, model.plateau = nn.Linear(8, 3), False
        model.accuracy = MulticlassAccuracy(3)
        trainer = trainer_of(
            run.directory, 1, library=pytorch_lightning, limit_val_batches=0,
            plugins=[lightning.ForgeEnvironment(run)], callbacks=[lightning.ForgeCallback(run)],
        )  # fmt: skip
        trainer.fit(model, loader())

    run = run_of(tmp_path, "run")
    with launched(run, 1, train) as launch:
        pass
    assert [(each.outcome, each.step) for each in launch.told] == [(RankOutcome.FINISHED, STEPS)]


# -- what is refused -------------------------------------------------------------------------------


class OwnStrategy(DDPStrategy):  # type: ignore[misc]
    """One that may do anything."""


def two_loaders(run: forge.Run) -> Any:
    return [loader(), loader()]


@pytest.mark.parametrize(("first", "then", "says"), [
    pytest.param(
        {}, {"data": lambda run: loader(batch_size=1)}, "had 2 samples, and now it has 1",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"data": lambda run: loader(Stream(run))},
        {"data": lambda run: loader(Stream(run, short=True))}, "before the position",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        None, {"data": lambda run: loader(stateful=True), "ranks": 2}, "does not hold its order",
        marks=pytest.mark.slow,
    ),
    pytest.param(None, {"data": two_loaders}, "2 training loaders", marks=pytest.mark.slow),
    pytest.param(
        None, {"devices": 2, "strategy": "ddp"}, "the run has 1", marks=pytest.mark.slow
    ),
    pytest.param(
        None, {"strategy": lambda run: OwnStrategy()}, "OwnStrategy", marks=pytest.mark.slow
    ),
])  # fmt: skip
def test_what_can_not_be_resumed_exactly_is_refused(
    tmp_path: Path, gate: Gate, first: Options | None, then: Options, says: str
) -> None:
    run = run_of(tmp_path, "run")
    if first is not None:
        stopped(run, gate, "step", 3, 1, **first)
    with launched(run, then.get("ranks", 1), program(**then)) as launch:
        pass
    assert launch.told[0].outcome is RankOutcome.FAILED
    attempt = fold(read_to_fold(run)).attempts[-1]
    assert says in repr(attempt)
