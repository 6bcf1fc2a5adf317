"""One rank's probe without the others: what it costs nobody, and that nothing of it is left."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.probe import ProbeArrived, ProbeBroke, ProbeDone
from slurm_forge.training.monitor.collective_probe import (
    Probe,
    value_of,
)

WORLD = 3


class Work:
    """A collective that is over when it is let go, as all ranks left it, or with an error."""

    def __init__(self, error: str = "") -> None:
        self.over = threading.Event()
        self.error = error

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[Message] = []
        self.spoke = threading.Condition()
        self.sent: list[torch.Tensor] = []
        self.works: list[Work] = []
        self.error = ""
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        self.spoilt = False
        self.aborted = threading.Event()
        self.probe = Probe(
            member=self,  # type: ignore[arg-type]
            group=self,  # type: ignore[arg-type]
            device=torch.device("cpu"),
            rank=1,
            world_size=WORLD,
            large=96,
            spoilt=lambda: self.spoilt,
        )

    def send(self, message: Message) -> None:
        with self.spoke:
            self.said.append(message)
            self.spoke.notify_all()

    def abort(self) -> None:
        self.aborted.set()

    def all_reduce(self, tensor: torch.Tensor, **_: Any) -> Work:
        self.sent.append(tensor)
        self.works.append(Work(self.error))
        return self.works[-1]

    def others(self, number: int, wrong: int | None = None) -> None:
        """What the other ranks contribute, and the end of it."""
        for tensor in self.sent:
            for rank in (0, 2):
                tensor[rank] += value_of(number, rank) + (1.0 if rank == wrong else 0.0)
        for work in self.works:
            work.over.set()

    def heard(self, kind: type[Any]) -> Any:
        with self.spoke:
            assert self.spoke.wait_for(lambda: any(isinstance(m, kind) for m in self.said), 20)
            return next(m for m in self.said if isinstance(m, kind))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Scene(monkeypatch)
    yield made
    made.probe.close()


@pytest.mark.parametrize("wrong", [None, 2])
@pytest.mark.parametrize("large", [False, True])
def test_what_arrives_changed_is_told_by_its_sender(
    scene: Scene, wrong: int | None, large: bool
) -> None:
    scene.probe.issue(7, large=large)
    assert isinstance(scene.said[0], ProbeArrived)
    assert len(scene.sent) == (2 if large else 1)
    scene.others(7, wrong)
    done = scene.heard(ProbeDone)
    assert done.wrong == ((() if wrong is None else (2,)),)
    assert (done.bandwidth[0] > 0) == large


def test_a_rehearsed_wrong_value_is_in_this_ranks_own_row(scene: Scene) -> None:
    scene.spoilt = True
    scene.probe.issue(3)
    assert [float(row) for row in scene.sent[0]] == [0.0, value_of(3, 1) + 1.0, 0.0]


def test_an_error_of_the_group_is_said_and_not_raised(scene: Scene) -> None:
    scene.error = "Connection closed by peer [127.0.0.1]:4711\nand much more"
    scene.probe.issue(1)
    scene.others(1)
    assert scene.heard(ProbeBroke).text == "Connection closed by peer [127.0.0.1]:4711"


def test_an_error_while_it_is_issued_is_said_and_not_raised(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("the group is aborted")

    monkeypatch.setattr(dist, "all_reduce", refuses)
    scene.probe.issue(1)
    assert scene.heard(ProbeBroke).id == 1


def test_nothing_is_left_of_it_once_it_is_closed_however_long_it_hangs(scene: Scene) -> None:
    scene.probe.issue(1)
    scene.probe.close()
    assert not [t for t in threading.enumerate() if t.name == "forge-probe" and t.is_alive()]
    before = list(scene.said)
    scene.probe.issue(2)
    assert scene.said == before, "a launch that is over is told nothing"


def test_values_are_never_zero_and_change_with_every_probe() -> None:
    seen = {value_of(number, 5) for number in range(100)}
    assert 0 not in seen
    assert len(seen) == 100


def test_a_probe_that_is_given_up_has_its_group_aborted_and_is_the_last(scene: Scene) -> None:
    scene.probe.issue(7)
    scene.probe.abandon()
    assert scene.aborted.wait(20)
    said = list(scene.said)
    scene.probe.issue(8)
    assert scene.said == said
