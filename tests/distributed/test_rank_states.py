"""State that ranks differ in by its nature is kept for each of them; of what is left, none may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_forge as forge
from slurm_forge.journal import RunState, RunStatus, fold, read_journal
from slurm_forge.journal.events import CheckpointCommitted, IncidentSeen, Note, Resumed
from slurm_forge.run_directory import RunDirectory
from slurm_forge.testing.digest import digest
from slurm_forge.training.rank.main import RankOutcome
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.distributed.launches import Launch, launched, new_run
from tests.fsdp import fully_shard

pytestmark = [pytest.mark.distributed]

STEPS = 10
SAVES = {"every_steps": 4, "every_minutes": None, "good_after_steps": 2, "keep_last": 9}


class Stream:
    """Samples of one rank: how many it leaves out, and its generator, are this rank's alone."""

    def __init__(self, rank: int) -> None:
        self.position = 0
        self.rank = rank
        self.noise = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.position += 1 + (self.position + self.rank) % 3
        draw = torch.Generator().manual_seed(1000 * self.rank + self.position)
        return torch.randn(4, 4, generator=draw) + torch.randn(4, 4, generator=self.noise)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "noise": self.noise.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.noise.set_state(state["noise"])


class Average:
    """An EMA that is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.shadow[name].lerp_(parameter, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_with_own_buffers(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, broadcast_buffers=False)


def fsdp2(model: nn.Module) -> nn.Module:
    sharded: nn.Module = fully_shard(model)  # type: ignore[assignment]
    return sharded


#: Called behind every update: the run, the model, and what else is registered.
Behind = Callable[[forge.Run, nn.Module, dict[str, Any]], None]


def nothing(run: forge.Run, model: nn.Module, registered: dict[str, Any]) -> None:
    """A program in order."""


def program(
    wrap: Callable[[nn.Module], nn.Module] = ddp, behind: Behind = nothing, **more: Any
) -> Callable[[forge.Run], None]:
    """An own loop; ``more`` makes further objects of the model and the optimizer."""

    def train(run: forge.Run) -> None:
        model = wrap(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        stream = Stream(run.rank)
        others = {name: make(model, optimizer) for name, make in more.items()}
        run.register(model=model, optimizer=optimizer, stream=stream, **others)
        for _ in run.steps(until=forge.Steps(STEPS)):
            loss = model(next(stream)).square().mean()
            loss.backward()
            run.apply(optimizer)
            behind(run, model, others)
            run.advance(loss=loss)

    return train


def state_of(run: RunDirectory) -> RunState:
    return fold(read_journal(run)[0])


def events(run: RunDirectory, kind: type) -> list[Any]:
    return [r.event for r in read_journal(run)[0] if isinstance(r.event, kind)]


def lived(run: RunDirectory, body: Any, ranks: int = 2) -> list[Launch]:
    """The launches of a run, to its end."""
    launches: list[Launch] = []
    while len(launches) < 4:
        with launched(run, ranks, body) as launch:
            pass
        launches.append(launch)
        if launch.decision is None or launch.decision.action is Action.HOLD:
            return launches
    raise AssertionError([each.decision for each in launches])


def notes(run: RunDirectory) -> str:
    return "\n".join(each.text for each in events(run, Note))


def evidence(run: RunDirectory) -> str:
    return "; ".join(
        each.text for seen in events(run, IncidentSeen) for each in seen.incident.evidence
    )


@pytest.mark.parametrize(
    ("wrap", "own"),
    [
        (ddp, "the ranks differ in object 'stream': each rank's own is saved"),
        (ddp_with_own_buffers, "1.running_mean of model 'model'"),
        pytest.param(fsdp2, "1.running_var of model 'model'", marks=pytest.mark.slow),
    ],
)
def test_what_ranks_differ_in_comes_back_to_each_of_them(
    tmp_path: Path, wrap: Any, own: str
) -> None:
    whole = new_run(tmp_path, "whole", checkpoint=SAVES)
    assert len(lived(whole, program(wrap))) == 1
    run = new_run(tmp_path, "run", checkpoint=SAVES, inject=["kill@3:rank0", "term@6:rank1"])
    launches = lived(run, program(wrap))
    assert len(launches) == 3
    assert {told.outcome for told in launches[-1].told} == {RankOutcome.FINISHED}
    assert digest(run.path) == digest(whole.path)
    assert own in notes(run)
    assert all(each.exact for each in events(run, Resumed))


def differ_from_step_5_on(run: forge.Run, model: nn.Module, registered: dict[str, Any]) -> None:
    registered["late"].shadow["buffer"].fill_(run.rank * (run.step_number >= 5))


class Late(Average):
    """A buffer that ranks fill differently after a while."""

    def __init__(self) -> None:
        self.shadow = {"buffer": torch.zeros(20_000)}


def test_a_save_that_finds_ranks_to_differ_in_what_is_large_is_not_resumed_from(
    tmp_path: Path,
) -> None:
    """It has rank 0's alone; those after it have each rank's."""
    made = program(behind=differ_from_step_5_on, late=lambda *_: Late())
    run = new_run(tmp_path, checkpoint=SAVES, inject=["term@6:rank1"])
    assert len(lived(run, made)) == 2
    assert [each.step for each in events(run, Resumed)] == [0, 4]
    found = [each.findings for each in events(run, CheckpointCommitted) if each.findings]
    # In the second launch, too: they are equal in its first step.
    assert found == [("the ranks differ in object 'late', and it has rank 0's alone",)] * 2
    assert state_of(run).status is RunStatus.FINISHED


@pytest.mark.parametrize("exact", [True, False])
def test_states_of_other_ranks_than_there_are_now(tmp_path: Path, exact: bool) -> None:
    """Refused, or rank 0's for all: then it is no exact resume."""
    run = new_run(
        tmp_path, checkpoint=SAVES, exact=exact, inject=["term@6:rank1"], recovery={"app_error": []}
    )
    with launched(run, 2, program()) as launch:
        pass
    assert {told.outcome for told in launch.told} == {RankOutcome.STOPPED}
    lived(run, program(), ranks=3)
    if exact:
        assert state_of(run).status is RunStatus.HELD
        told = evidence(run)
        assert "failed: ranks 0, 1, 2: each rank has a state of its own of stream" in told
        assert "those of 2 ranks, and there are 3 now" in told
        return
    assert state_of(run).status is RunStatus.FINISHED
    assert "each rank's own of object 'stream', and there are other ranks now" in notes(run)
    assert [each.exact for each in events(run, Resumed)][-1] is False


def wrong_on_rank_1(run: forge.Run, model: nn.Module, registered: dict[str, Any]) -> None:
    if (run.rank, run.step_number) != (1, 5):
        return
    if "scheduler" in registered:
        registered["scheduler"].step()
    elif "average" in registered:
        registered["average"].shadow["module.0.bias"].view(torch.int32).bitwise_xor_(1)
    else:
        with torch.no_grad():
            registered["copy"].module[2].bias.add_(1e-3)


def behind_each(run: forge.Run, model: nn.Module, registered: dict[str, Any]) -> None:
    for name, each in registered.items():
        if name == "scheduler":
            each.step()
        elif name == "average":
            each.update()
        else:
            each.update_parameters(model)
    wrong_on_rank_1(run, model, registered)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            {"average": lambda model, _: Average(model)},
            "shadow.module.0.bias of object 'average' differs between ranks 0 and 1",
        ),
        pytest.param(
            {"copy": lambda model, _: torch.optim.swa_utils.AveragedModel(model.module)},
            "2.bias of model 'copy' differs between ranks 0 and 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"scheduler": lambda _, optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)},
            "object 'scheduler' differs between ranks 0 and 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_has_to_be_equal_and_is_not_is_held(
    tmp_path: Path, made: dict[str, Any], says: str
) -> None:
    run = new_run(tmp_path, checkpoint=SAVES)
    (launch,) = lived(run, program(behind=behind_each, **made))
    assert launch.decision is not None and launch.decision.action is Action.HOLD
    assert [each.incident.cause for each in events(run, IncidentSeen)] == [Cause.RANK_MISMATCH]
    assert says in evidence(run) and "they were equal after step 4" in evidence(run)
