"""Ranks that should hold the same and do not: found, named, held, and never trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from slurm_forge.checkpoint.collectives import Ranks
from slurm_forge.errors import UnsupportedError
from slurm_forge.journal import RunState, RunStatus, fold, read_journal
from slurm_forge.journal.events import CheckpointCommitted, Event, IncidentSeen, Note, Resumed
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.data.batches import Batch
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Incident
from slurm_forge.vocabulary.trust import Trust
from tests.distributed.launches import Gate, Launch, launched, new_run, newest_manifest
from tests.distributed.ranks import run_ranks
from tests.fsdp import fully_shard

pytestmark = [pytest.mark.distributed]

STEPS, SAVE_EVERY, BATCH = 12, 4, 8
#: Steps until a run has surely heard of what a save has found.
LONG = 5_000


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, torch.stack([x.sum(), x[0] - x[1]])


Wrap = Callable[[nn.Module], nn.Module]


def net(*, normalised: bool = True) -> nn.Module:
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(6) if normalised else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 6), middle, nn.Linear(6, 2))


def program(
    wrap: Wrap,
    *,
    damage: Callable[[forge.Run, nn.Module, torch.optim.Optimizer], None] = lambda *_: None,
    before: Callable[[forge.Run], None] = lambda _: None,
    build: Callable[[int], nn.Module] = lambda _: net(),
    until: int = STEPS,
    batch: int = BATCH,
) -> Callable[[forge.Run], None]:
    """``damage`` is called behind every step."""

    def train(run: forge.Run) -> None:
        model = wrap(build(run.rank))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        run.register(model=model, optimizer=optimizer)
        before(run)

        def compute_loss(micro: Any) -> torch.Tensor:
            return (model(micro[0]) - micro[1][:, :1]).square().mean()

        for one in run.batches(Points(), global_batch_size=batch, until=forge.Steps(until)):
            run.train_step(one, compute_loss, max_norm=1.0)
            damage(run, model, optimizer)

    return train


def flip(tensor: torch.Tensor, bit: int = 3) -> None:
    """One bit of its first value, as a fault of the memory does."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)


def flip_weight_on(rank: int, *, after: int) -> Any:
    def damage(run: forge.Run, model: nn.Module, _: torch.optim.Optimizer) -> None:
        if (run.rank, run.step_number) == (rank, after):
            flip(model.get_parameter("module.2.weight"))

    return damage


@dataclass
class End:
    """How a run stands after a launch."""

    launch: Launch
    state: RunState
    events: list[Event]

    @property
    def incident(self) -> Incident:
        (incident,) = (e.incident for e in self.events if isinstance(e, IncidentSeen))
        return incident

    @property
    def text(self) -> str:
        return "; ".join(each.text for each in self.incident.evidence)

    @cached_property
    def trust(self) -> dict[int, Trust]:
        return {each.name.step: each.trust for each in self.state.known}

    @property
    def notes(self) -> list[str]:
        return [e.text for e in self.events if isinstance(e, Note)]


def train(
    run: RunDirectory, what: Callable[[forge.Run], None], *, ranks: int = 2, hosts: Any = ()
) -> End:
    with launched(run, ranks, what, hosts=hosts) as launch:
        pass
    records, _ = read_journal(run)
    return End(launch, fold(records), [record.event for record in records])


def made(folder: Path, **recovery: Any) -> RunDirectory:
    return new_run(
        folder,
        checkpoint={"every_steps": SAVE_EVERY, "every_minutes": None, "good_after_steps": 2},
        recovery=recovery,
    )


def held(end: End) -> None:
    assert end.state.status is RunStatus.HELD, end.state
    assert end.launch.decision is not None and end.launch.decision.action is Action.HOLD
    assert end.incident.cause is Cause.RANK_MISMATCH
    assert {told.outcome for told in end.launch.told} == {RankOutcome.GIVEN_UP}


def suspected_from_step_8_on(end: End) -> None:
    """Ranks go on for some steps until all have heard of what the save at step 8 found."""
    assert end.trust.pop(4) is Trust.GOOD
    assert set(end.trust.values()) == {Trust.SUSPECT}
    saves = [event for event in end.events if isinstance(event, CheckpointCommitted)]
    assert [bool(each.findings) for each in saves[:2]] == [False, True]


def test_a_plain_model_on_two_ranks_is_held_after_the_first_step(tmp_path: Path) -> None:
    end = train(made(tmp_path), program(lambda model: model))
    held(end)
    assert "0.bias of model 'model'" in end.text and "more differ between ranks 0 and 1" in end.text
    assert "after step 1, the first comparison" in end.text
    assert "wrap the model in DistributedDataParallel or fully_shard" in end.text
    assert Trust.GOOD not in end.trust.values() and Trust.WRITTEN not in end.trust.values()


def test_a_flipped_bit_is_found_at_the_next_save(tmp_path: Path) -> None:
    damage = flip_weight_on(1, after=5)
    end = train(made(tmp_path), program(DistributedDataParallel, damage=damage, until=LONG))
    held(end)
    assert "2.weight of model 'model'" in end.text and "between ranks 0 and 1" in end.text
    assert "after step 8; they were equal after step 4" in end.text
    assert end.incident.onset == 5 and "wrap the model" not in end.text
    suspected_from_step_8_on(end)
    manifest = newest_manifest(end.launch.run)
    assert manifest is not None and "2.weight of model 'model'" in manifest.findings[0]


@pytest.mark.slow
def test_a_rank_that_differs_alone_is_named_with_its_node(tmp_path: Path) -> None:
    damage = flip_weight_on(2, after=5)
    hosts = ("n01", "n02", "n03")
    ranks = program(DistributedDataParallel, damage=damage, batch=12, until=LONG)
    end = train(made(tmp_path), ranks, ranks=3, hosts=hosts)
    held(end)
    assert "on rank 2 (n03) from the 2 other ranks" in end.text
    assert (end.incident.rank, end.incident.hosts) == (2, ("n03",))


@pytest.mark.slow
def test_optimizer_state_that_differs_is_found(tmp_path: Path) -> None:
    def damage(run: forge.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if (run.rank, run.step_number) == (0, 6):
            flip(optimizer.state[model.get_parameter("module.0.bias")]["exp_avg_sq"], bit=0)

    end = train(made(tmp_path), program(DistributedDataParallel, damage=damage, until=LONG))
    held(end)
    assert "exp_avg_sq of 0.bias of model 'model' (optimizer 'optimizer')" in end.text
    suspected_from_step_8_on(end)


@pytest.mark.slow
def test_what_differs_after_the_last_save_does_not_finish(tmp_path: Path) -> None:
    damage = flip_weight_on(1, after=STEPS - 1)
    end = train(made(tmp_path), program(DistributedDataParallel, damage=damage))
    held(end)
    assert f"after step {STEPS}; they were equal after step 8" in end.text
    assert end.state.status is not RunStatus.FINISHED
    assert all(end.trust[step] is not Trust.SUSPECT for step in (4, 8))


@pytest.mark.slow
def test_replicas_of_a_sharded_model_are_compared_on_their_ranks(tmp_path: Path) -> None:
    """HSDP: ranks 0 and 2 hold the same shard, and so do 1 and 3."""

    def wrap(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))

    def damage(run: forge.Run, model: nn.Module, _: torch.optim.Optimizer) -> None:
        if (run.rank, run.step_number) == (3, 5):
            flip(model.get_parameter("0.weight").to_local())

    end = train(
        made(tmp_path), program(wrap, damage=damage, build=lambda _: net(normalised=False)), ranks=4
    )
    held(end)
    assert "0.weight of model 'model' differs between ranks 1 and 3" in end.text
    equal = train(
        made(tmp_path / "equal"), program(wrap, build=lambda _: net(normalised=False)), ranks=4
    )
    assert equal.state.status is RunStatus.FINISHED


@pytest.mark.slow
def test_a_job_that_tolerates_a_difference_goes_on(tmp_path: Path) -> None:
    run = made(tmp_path, rank_mismatch=[{"do": "warn"}])
    end = train(run, program(DistributedDataParallel, damage=flip_weight_on(1, after=2)))
    assert end.state.status is RunStatus.FINISHED
    assert end.incident.cause is Cause.RANK_MISMATCH
    assert Trust.SUSPECT not in end.trust.values()


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
def test_two_stages_of_one_name_are_not_trained_on(tmp_path: Path, wide: bool) -> None:
    """Of equal shapes they are held; of others the plan of the checkpoints is refused."""

    def stage(rank: int) -> nn.Module:
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(4, 6 + rank if wide else 6), nn.LazyLinear(1))

    def build(rank: int) -> nn.Module:
        model = stage(rank)
        model(torch.zeros(1, 4))
        return model

    run = made(tmp_path, app_error=[])
    end = train(run, program(lambda model: model, build=build))
    assert end.state.status is RunStatus.HELD
    if wide:
        assert "float32[6, 4] on rank 0 and float32[7, 4] on rank 1" in end.text
        assert end.incident.cause is Cause.APP_ERROR
    else:
        held(end)
        assert "pipeline stages" in end.text
    assert newest_manifest(run) is None


@pytest.mark.slow
def test_ranks_on_the_same_samples_are_held(tmp_path: Path) -> None:
    def own_loop(run: forge.Run) -> None:
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        run.register(model=model, optimizer=optimizer)
        run.restore()
        for number in range(6):
            ids = tuple((0, 4 * number + each) for each in range(4))  # forgot the rank
            x = torch.stack([Points()[index][0] for _, index in ids])
            batch = Batch(
                step=number, consumed=0, micro_batches=(x,), micro_sizes=(4,), sample_ids=ids
            )
            run.train_step(batch, lambda x: model(x).square().mean())

    end = train(made(tmp_path), own_loop)
    held(end)
    assert "ranks 0 and 1 trained on the same samples in the last step: all 4" in end.text


class Forgetful:
    """A loader of somebody's that every rank makes alike, with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Forgetful:
        return self

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(4, 4, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("way", ["steps", pytest.param("batches", marks=pytest.mark.slow)])
def test_a_forgotten_sampler_is_found_by_what_the_model_is_given(tmp_path: Path, way: str) -> None:
    def train_alike(run: forge.Run) -> None:
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        data = Forgetful()

        def compute_loss(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        if way == "batches":
            run.register(model=model, optimizer=optimizer)
            for batch in run.batches(data, until=forge.Steps(LONG)):
                run.train_step(batch, compute_loss)
            return
        run.register(model=model, optimizer=optimizer, data=data)
        for _ in run.steps(until=forge.Steps(LONG)):
            compute_loss(next(data)).backward()
            run.apply()
            run.advance()

    end = train(made(tmp_path), train_alike)
    held(end)
    assert "ranks 0 and 1 gave model 'model' the same inputs in 3 steps" in end.text
    assert "DistributedSampler" in end.text


@pytest.mark.slow
def test_a_dataset_that_is_divided_twice_is_refused(tmp_path: Path) -> None:
    def train_divided(run: forge.Run) -> None:
        model = DistributedDataParallel(net())
        run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
        own = torch.utils.data.Subset(Points(), range(run.rank, 64, 2))
        for batch in run.batches(own, global_batch_size=BATCH, until=forge.Steps(STEPS)):
            run.train_step(batch, lambda micro: model(micro[0]).square().mean())

    end = train(made(tmp_path, app_error=[]), train_divided)
    assert end.state.status is RunStatus.HELD and end.incident.cause is Cause.APP_ERROR
    assert "the ranks differ: the digest of the dataset is" in end.text


def test_ranks_in_different_exchanges_are_told_what_each_is_doing() -> None:
    def meet(rank: int) -> tuple[str, bool]:
        ranks, doing = Ranks(dist.group.WORLD), ("Preparing a checkpoint", "Ending the run")
        with pytest.raises(UnsupportedError) as caught:
            ranks.agree(None, {"parts": rank}, lambda all_of: all_of[0]["parts"], doing=doing[rank])
        ranks.agree(None, None, lambda _: None, doing="Going on together")
        return caught.value.message, "leave the loop after the same step" in caught.value.next_step

    text = "rank 0: Preparing a checkpoint; rank 1: Ending the run"
    assert (
        run_ranks(2, meet, timeout=60)
        == [(f"the ranks are at different places of the program: {text}", True)] * 2
    )


# -- what is loaded, and a program that refuses it ---------------------------------------------


class Rounding(nn.Linear):
    """A layer whose state dict comes back changed."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        with torch.no_grad():
            self.weight.mul_(1.0 + 1e-3)


def stop_at(run: RunDirectory, step: int, **given: Any) -> None:
    """A launch that is stopped there: its last checkpoint is one that a stop has written."""
    gate = Gate()

    def wait(run: forge.Run, *_: Any) -> None:
        if (run.step_number, run.rank) == (step, 0):
            gate.wait(0)

    with launched(run, 2, program(DistributedDataParallel, damage=wait, **given)) as launch:
        launch.at(gate, 1)
        launch.stop_together()
        gate.open()
    gate.close()
    manifest = newest_manifest(run)
    assert {told.outcome for told in launch.told} == {RankOutcome.STOPPED}
    assert manifest is not None and manifest.reason == "stop"


def resumed(end: End) -> Resumed:
    return [event for event in end.events if isinstance(event, Resumed)][-1]


@pytest.mark.parametrize("layer", [nn.Linear, pytest.param(Rounding, marks=pytest.mark.slow)])
def test_what_a_stop_has_written_is_compared_bit_by_bit(tmp_path: Path, layer: Any) -> None:
    def build(_: int) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(layer(4, 6), nn.Linear(6, 2))

    run = made(tmp_path)
    stop_at(run, 5, build=build)
    second = train(run, program(DistributedDataParallel, build=build))
    assert second.state.status is RunStatus.FINISHED and 5 <= resumed(second).step < STEPS
    told = [note for note in second.notes if "not bit for bit what was saved" in note]
    assert bool(told) is (layer is Rounding)
    assert resumed(second).exact is (layer is nn.Linear)


@pytest.mark.parametrize("refuses", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_program_may_refuse_what_it_resumes_from(tmp_path: Path, refuses: bool) -> None:
    def validates(run: forge.Run) -> None:
        @run.on("on_resume", all_ranks=True)
        def check(step: int, **_: object) -> None:
            total = torch.ones(1)
            dist.all_reduce(total)  # a validation over all ranks
            if refuses and run.rank == 1:
                raise forge.RefuseResume(f"{int(total)} ranks, and the loss is 7.5")

    run = made(tmp_path)
    stop_at(run, 5)
    before = sorted(path.name for path in run.checkpoints.iterdir())
    end = train(run, program(DistributedDataParallel, before=validates))
    if not refuses:
        assert end.state.status is RunStatus.FINISHED
        return
    assert end.state.status is RunStatus.HELD
    assert "rank 1: 2 ranks, and the loss is 7.5" in end.state.reason
    assert {told.outcome for told in end.launch.told} == {RankOutcome.GIVEN_UP}
    assert sorted(path.name for path in run.checkpoints.iterdir()) == before
