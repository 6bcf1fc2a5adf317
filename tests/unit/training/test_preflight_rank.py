"""A rank's part in the look at all nodes: what it tells the others of its group, and by when."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from slurm_forge.control.addresses import usable_hosts
from slurm_forge.control.messages.hub import Publish
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.preflight import PreflightRound, Thoroughness
from slurm_forge.launch.conductor import preflight_monitor as hub_side
from slurm_forge.launch.conductor import shutdown as ending
from slurm_forge.training.core import process_group
from slurm_forge.training.core.process_group import connect_store, host_store, store_hosts
from slurm_forge.training.core.rank_info import RankPlace
from slurm_forge.training.preflight import group_test as group_trial
from slurm_forge.training.preflight import main as preflight
from slurm_forge.training.preflight.child import GroupTestRequest
from slurm_forge.training.preflight.group_test import GroupTest, try_together
from slurm_forge.training.preflight.main import Preflight
from slurm_forge.training.preflight.node_checks import NodeRequirements


@dataclass
class Channel:
    """The hub as a rank sees it: an address comes after ``late_s``."""

    late_s: float = 0.0
    now: float = 100.0
    said: list[Message] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def published(self, key: str, wait_s: float) -> str:
        self.now += self.late_s
        return "n1:4000"

    def send(self, message: Message) -> None:
        self.said.append(message)


def part(rank: int, group: Sequence[int], channel: Channel) -> list[GroupTestRequest]:
    """What is asked of the child of ``rank`` in a round of one group with a limit of 10 s."""
    place = RankPlace(rank=rank, local_rank=0, world_size=9, job="1", restart_count=0, node="n1")
    mine = Preflight(
        channel,  # type: ignore[arg-type]
        place,
        NodeRequirements(thoroughness=Thoroughness.FULL),
        nonce="x",
        environ={},
        within=timedelta(seconds=60),
        own_address="10.9.9.9",
    )
    asked: list[GroupTestRequest] = []

    def trial(wanted: GroupTestRequest, published: object) -> GroupTest:
        asked.append(wanted)
        if wanted.rank == 0:
            published(4000)  # type: ignore[operator]
        return GroupTest(ok=True, seconds=0.1)

    with (
        mock.patch.object(mine._looker, "trial", trial),
        mock.patch.object(preflight, "time", channel),
    ):
        mine._take_part(2, PreflightRound(groups=(tuple(group),), within_s=10.0))
    return asked


@pytest.mark.parametrize(("late_s", "left_s"), [(0.0, 10.0), (7.0, 3.0), (9.9, 0.5)])
def test_waiting_for_the_first_rank_is_part_of_the_time_of_a_collective(
    late_s: float, left_s: float
) -> None:
    (asked,) = part(4, (3, 4), Channel(late_s=late_s))
    assert asked.within_s == pytest.approx(left_s)


def test_the_first_rank_says_where_it_is_to_its_group_only() -> None:
    channel = Channel()
    part(3, (3, 4, 8), channel)
    (address,) = [each for each in channel.said if isinstance(each, Publish)]
    assert address.to == (4, 8)
    assert address.value.startswith("10.9.9.9,")


def test_an_address_that_nobody_knows_takes_no_time_from_the_one_that_answers() -> None:
    tried: list[str] = []

    def store(host: str, *_: object, **__: object) -> str:
        tried.append(host)
        return "store"

    def answering(hosts: Sequence[str], port: int, within_s: float) -> tuple[str, ...]:
        assert within_s < 10.0
        return tuple(reversed(hosts))

    with (
        mock.patch.object(process_group, "TCPStore", store),
        mock.patch.object(process_group, "answering_first", answering),
    ):
        within = timedelta(seconds=10)
        connect_store(("unknown", "10.0.0.1"), 1, 2, within, answer_within=within / 2)
    assert tried == ["10.0.0.1"]


@pytest.mark.parametrize("one_node", [True, False])
def test_the_store_of_one_node_can_not_be_reached_from_another(one_node: bool) -> None:
    """Another address of this machine stands for the network."""
    store = host_store(1, timedelta(seconds=10), one_node=one_node)
    store.set("key", "value")
    hosts = usable_hosts(store_hosts("10.1.2.3", one_node=one_node))
    assert hosts[-1] == "127.0.0.1" and (len(hosts) == 1) is one_node
    found = connect_store(
        hosts[-1:], store.port, 1, timedelta(seconds=10), answer_within=timedelta(seconds=5)
    )
    assert found.get("key") == b"value"
    with socket.socket() as outside:
        assert (outside.connect_ex(("127.0.0.2", store.port)) != 0) is one_node


def test_the_sum_of_8190_ranks_is_right() -> None:
    """It is no number of a float32."""
    size = 8190

    def allreduce(tensors: list[torch.Tensor]) -> mock.Mock:
        (tensor,) = tensors
        tensor.fill_(size * (size + 1) // 2)
        return mock.Mock()

    with mock.patch.object(
        group_trial, "standalone_group", lambda *_: mock.Mock(allreduce=allreduce)
    ):
        trial = try_together(
            HashStore(),
            nonce="x",
            rank=3,
            size=size,
            backend="gloo",
            device=torch.device("cpu"),
            within=timedelta(seconds=10),
            keep=lambda _: None,
        )
    assert trial.ok, trial.text


@pytest.mark.parametrize("within_s", [1.0, 60.0, 3600.0])
def test_ranks_wait_until_the_hub_has_named_who_does_not_come(within_s: float) -> None:
    place = RankPlace(rank=0, local_rank=0, world_size=2, job="1", restart_count=0)
    mine = Preflight(
        Channel(),  # type: ignore[arg-type]
        place,
        NodeRequirements(thoroughness=Thoroughness.FULL),
        nonce="x",
        environ={},
        within=timedelta(seconds=within_s),
    )
    hub_waits_s = max(hub_side._PATIENCE * within_s, hub_side._IMPORTS_S, ending._JOIN_S)
    assert mine._meet_s > hub_waits_s + hub_side._SILENT_S
