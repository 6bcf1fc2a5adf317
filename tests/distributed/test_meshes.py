"""Runs on device meshes: as one rank alone would train, and interrupted as if they were not.

What another order of summation may change is bounded: all arithmetic is in float64, the weights are
of order 1, and after 12 clipped steps of AdamW they differ from those of one rank by less than
1e-10.  A sample, weight, norm or random number that is wrong changes them by 1e-3 and more.
"""

from __future__ import annotations

import copy
import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import slurm_forge as forge
from slurm_forge.errors import UsageError
from slurm_forge.journal import events as ev
from slurm_forge.journal import read_journal
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.core.rank_layout import RankLayout
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.training.step.gradient_norms import Gradients
from slurm_forge.vocabulary.decision import Action
from tests import meshes
from tests.distributed.launches import Gate, Launch, launched, new_run, newest_manifest
from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed]

BOUND = 1e-10
SAVES = {"every_steps": 4, "good_after_steps": 2}
FAST = ("tp", "pp-local")
NAMES = [
    pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in meshes.MESHES
]
#: Pipeline schedules drive DDP's reducer themselves: its first step sums in another order.
EXACT = [name for name in NAMES if name.values != ("pp-ddp",)]


def run_of(folder: Path, mesh: str, **spec: Any) -> RunDirectory:
    args = {"experts": mesh == "ep", **spec.pop("args", {})}
    return new_run(folder, **{"checkpoint": SAVES, "args": args, **spec})


def ended(launch: Launch, *, step: int = meshes.STEPS) -> None:
    assert [(told.outcome, told.step) for told in launch.told] == [
        (RankOutcome.FINISHED, step)
    ] * launch.hub.world_size


def trained(run: RunDirectory, mesh: str, ranks: int | None = None, **how: Any) -> RunDirectory:
    """The run after a launch that nothing disturbs."""
    with launched(run, ranks or meshes.MESHES[mesh].ranks, meshes.program(mesh, **how)) as launch:
        pass
    ended(launch)
    return run


def weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    """The final weights, of all pipeline stages."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(run.path.glob("weights-*.pt")):
        for name, tensor in torch.load(file).items():
            if name in found:
                assert torch.equal(found[name], tensor), f"{file.name}: {name} differs"
            found[name] = tensor
    return found


def by_stage(run: RunDirectory) -> list[torch.Tensor]:
    """The final weights in the order of the layers, where every rank is a stage of its own."""
    files = sorted(run.path.glob("weights-*.pt"))
    return [tensor for file in files for tensor in torch.load(file).values()]


def samples(run: RunDirectory, rank: int) -> list[list[int]]:
    """Of a rank, step by step."""
    lines = (run.path / f"samples-{rank}").read_text().splitlines()
    return [json.loads(line.partition(" ")[2]) for line in lines]


@pytest.mark.parametrize("loss", ["mean", pytest.param("counted", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", NAMES)
def test_a_mesh_trains_as_one_rank_does(tmp_path: Path, mesh: str, loss: str) -> None:
    if loss == "counted" and mesh.startswith(("pp", "dp-pp")):
        pytest.skip("a pipeline schedule computes the loss itself")
    args = {"counted": loss == "counted"}
    alone = trained(run_of(tmp_path, mesh, name="alone", args=args), mesh, ranks=1)
    together = trained(run_of(tmp_path, mesh, name="mesh", args=args), mesh)
    expected = weights(alone)
    if mesh == "pp-local":
        names = [name for name in expected if not name.startswith("last")]
        names += [name for name in expected if name.startswith("last")]
        found = dict(zip(names, by_stage(together), strict=True))
    else:
        found = weights(together)
    assert found.keys() == expected.keys()
    in_group = dict(zip(meshes.MESHES[mesh].names, meshes.MESHES[mesh].shape, strict=True))
    copies = math.prod(in_group.get(name, 1) for name in ("tp", "cp", "pp"))
    every = [samples(together, rank) for rank in range(meshes.MESHES[mesh].ranks)]
    for step, of_all in enumerate(samples(alone, 0)):
        assert sorted(of_all * copies) == sorted(i for own in every for i in own[step])
    apart = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert apart < BOUND


def _stop(launch: Launch, gate: Gate, ranks: int) -> None:
    launch.at(gate, ranks)
    launch.kill(ranks - 1, signal.SIGTERM)
    launch.heard()
    gate.open()


@pytest.mark.parametrize("mesh", EXACT)
def test_a_stopped_run_ends_as_one_that_was_not(tmp_path: Path, gate: Gate, mesh: str) -> None:
    args = {"dropout": 0.1}
    ranks = meshes.MESHES[mesh].ranks
    undisturbed = trained(run_of(tmp_path, mesh, name="undisturbed", args=args), mesh)
    run = run_of(tmp_path, mesh, name="stopped", args=args)

    def before(run: forge.Run) -> None:
        if run.attempt == 1 and run.step_number == 6:
            gate.wait(run.rank)

    with launched(run, ranks, meshes.program(mesh, before=before)) as launch:
        _stop(launch, gate, ranks)
    assert {told.outcome for told in launch.told} == {RankOutcome.STOPPED}
    trained(run, mesh)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)
    told = [(record.attempt, record.event) for record in read_journal(run)[0]]
    assert [each.exact for _, each in told if isinstance(each, ev.Resumed)] == [True, True]
    # The loss behind the stop is computed by its ranks, and compared by those of the next attempt.
    first = [each for attempt, each in told if attempt == 1]
    (saved,) = (e for e in first if isinstance(e, ev.CheckpointCommitted) and e.reason == "stop")
    known = [each.name for each in first if isinstance(each, ev.CheckpointWitnessed)]
    assert (saved.name in known) is ("pp" not in meshes.MESHES[mesh].names)
    assert not any("micro-batch" in each.text for _, each in told if isinstance(each, ev.Note))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("tp", "alone"),
        pytest.param("alone", "tp", marks=pytest.mark.slow),
        pytest.param("fsdp-tp", "tp", marks=pytest.mark.slow),
        pytest.param("tp", "fsdp-tp", marks=pytest.mark.slow),
        pytest.param("hsdp", "hsdp-tp", marks=pytest.mark.slow),
        pytest.param("cp", "tp-sp", marks=pytest.mark.slow),
        pytest.param("pp", "fsdp-tp", marks=pytest.mark.slow),
        pytest.param("hsdp", "pp-ddp", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_on_another_mesh(tmp_path: Path, gate: Gate, first: str, then: str) -> None:
    def trainer(name: str, **how: Any) -> Any:
        return meshes.program("tp" if name == "alone" else name, **how)

    def ranks(name: str) -> int:
        return 1 if name == "alone" else meshes.MESHES[name].ranks

    expected = weights(trained(run_of(tmp_path, "tp", name="alone"), "tp", ranks=1))
    run = run_of(tmp_path, "tp", name="moved")

    def before(run: forge.Run) -> None:
        if run.attempt == 1 and run.step_number == 6:
            gate.wait(run.rank)

    with launched(run, ranks(first), trainer(first, before=before)) as launch:
        _stop(launch, gate, ranks(first))
    with launched(run, ranks(then), trainer(then)) as launch:
        pass
    ended(launch)
    found = weights(run)
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < BOUND
    resumed = [r.event.exact for r in read_journal(run)[0] if isinstance(r.event, ev.Resumed)]
    assert resumed == [True, False]  # random states belong to another mesh


@pytest.mark.slow
def test_on_another_mesh_the_ranks_of_a_group_draw_the_same_numbers(
    tmp_path: Path, gate: Gate
) -> None:
    run = run_of(tmp_path, "fsdp-tp", args={"dropout": 0.1})

    def before(run: forge.Run) -> None:
        if run.attempt == 1 and run.step_number == 6:
            gate.wait(run.rank)
        if run.attempt == 2:
            drawn = torch.get_rng_state().sum().item()
            with (run.directory / f"random-{run.rank}").open("a") as file:
                file.write(f"{run.step_number} {drawn}\n")

    with launched(run, 4, meshes.program("hsdp", before=before)) as launch:
        _stop(launch, gate, 4)
    with launched(run, 4, meshes.program("fsdp-tp", before=before)) as launch:
        pass
    ended(launch)
    first, second, third, fourth = ((run.path / f"random-{rank}").read_text() for rank in range(4))
    assert (first, third) == (second, fourth)
    assert first != third
    resumed = [r.event.exact for r in read_journal(run)[0] if isinstance(r.event, ev.Resumed)]
    assert resumed == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", EXACT)
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, mesh: str) -> None:
    args = {"dropout": 0.1}
    ranks = meshes.MESHES[mesh].ranks
    undisturbed = trained(run_of(tmp_path, mesh, name="undisturbed", args=args), mesh)
    run = run_of(tmp_path, mesh, name="killed", args=args)
    before = meshes.killed_at(10, ranks - 1)
    with launched(run, ranks, meshes.program(mesh, before=before)):
        pass
    trained(run, mesh)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)


def skips_and_rollbacks(run: RunDirectory) -> tuple[int, int]:
    seen = [record.event for record in read_journal(run)[0]]
    decided = [event.decision.action for event in seen if isinstance(event, ev.DecisionTaken)]
    skipped = sum(isinstance(event, ev.StepSkipped) for event in seen)
    return skipped, decided.count(Action.ROLLBACK)


@pytest.mark.parametrize("mesh", EXACT)
def test_bad_steps_are_skipped_and_rolled_back_by_all_ranks(
    tmp_path: Path, gate: Gate, mesh: str
) -> None:
    ranks = meshes.MESHES[mesh].ranks
    ladder = [{"do": "skip", "times": 3}, {"do": "rollback", "times": 2}]
    spec: dict[str, Any] = {"recovery": {"non_finite": ladder}, "args": {"dropout": 0.1}}
    if "pp" in mesh:
        spec["args"] |= {"bad_steps": [5], "bad_once": [8, 9, 10]}
    else:
        spec["inject"] = [f"nan@6:rank{ranks - 1}", f"nan@9x3:rank{ranks - 1}"]
    undisturbed = run_of(tmp_path, mesh, name="bad", **copy.deepcopy(spec))
    with launched(undisturbed, ranks, meshes.program(mesh)) as launch:
        pass
    ended(launch)
    skipped, rollbacks = skips_and_rollbacks(undisturbed)
    assert (skipped in (4, 5), rollbacks) == (True, 1)  # the rollback may come by the first again
    if mesh != "pp-local":
        weights(undisturbed)  # all ranks that hold a weight hold the same
    run = run_of(tmp_path, mesh, name="stopped", **spec)

    def before(run: forge.Run) -> None:
        if run.attempt == 1 and run.step_number == 7:
            gate.wait(run.rank)

    with launched(run, ranks, meshes.program(mesh, before=before)) as launch:
        _stop(launch, gate, ranks)
    trained(run, mesh)
    skipped, rollbacks = skips_and_rollbacks(run)
    assert (skipped in (4, 5), rollbacks) == (True, 1)
    assert digest(run.path, random=True) == digest(undisturbed.path, random=True)


def test_a_tensor_parallel_model_without_its_mesh_is_refused(tmp_path: Path) -> None:
    def train(run: forge.Run) -> None:
        mesh = meshes.MESHES["tp"].make()
        model = meshes.laid_out(meshes.whole(run), "tp", mesh)
        run.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), foreach=False))
        with pytest.raises(UsageError) as caught:
            next(iter(run.batches(meshes.Sequences(), global_batch_size=8, until=forge.Steps(3))))
        (run.directory / f"refused-{run.rank}").write_text(
            f"{caught.value.message} | {caught.value.next_step}"
        )
        raise caught.value

    run = new_run(tmp_path)
    with launched(run, 2, train):
        pass
    for rank in range(2):
        text = (run.path / f"refused-{rank}").read_text()
        assert "model.layers.0.up.weight is laid out as [Shard(dim=0)]" in text
        assert "run.batches(…, mesh=mesh)" in text
    assert newest_manifest(run) is None


KINDS = [
    pytest.param(name, marks=[] if name == "fsdp-tp" else [pytest.mark.slow])
    for name in ("tp", "tp-sp", "fsdp-tp", "hsdp", "hsdp-tp", "cp", "ep", "pp", "dp-pp-tp")
]


@pytest.mark.parametrize("mesh", KINDS)
def test_the_norm_counts_every_parameter_once(mesh: str) -> None:
    described = meshes.MESHES[mesh]
    run: Any = SimpleNamespace(args={"experts": mesh == "ep"}, device=torch.device("cpu"))

    def body(rank: int) -> float:
        device_mesh = described.make()
        layout = RankLayout.of_mesh(device_mesh, described.data_parallel)
        if layout.stages > 1:
            model = meshes.part_of(run, described, device_mesh, layout.stage, layout.stages)
        else:
            model = meshes.laid_out(meshes.whole(run), described.kind, device_mesh)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = parameter.detach() * 0.3
        norm, _ = Gradients(parameters).norm(layout.pipeline_group)
        return norm.item()

    squares = sum(float(p.detach().square().sum()) for p in meshes.whole(run).parameters())
    norms = run_ranks(described.ranks, body)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(0.3 * math.sqrt(squares), rel=1e-14)
