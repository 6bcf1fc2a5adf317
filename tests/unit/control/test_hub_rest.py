"""A hub of many ranks hears what nobody waits for together; what somebody waits for, at once."""

import queue

import pytest

from slurm_forge.control import Member
from slurm_forge.control import hub as hub_module
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.hub import Hub
from slurm_forge.control.hub_events import HubEvent, MessageReceived, TargetAgreed
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import Notice
from slurm_forge.control.messages.step_timing import StepTiming
from tests.channel_ends import hub_of

TIMING = StepTiming(step=1, count=1, own_s=(0.1,), spread_s=(0.0,), trial_s=(0.0,))
NOTICE = Notice(what="SIGTERM")


def heard(hub: Hub) -> list[Message]:
    """What the conductor is told now."""
    said: list[HubEvent] = []
    while True:
        try:
            said.append(hub.events.get_nowait())
        except queue.Empty:
            return [each.message for each in said if isinstance(each, MessageReceived)]


class Scene:
    def __init__(self, world: int, joined: int | None = None) -> None:
        self.now = 100.0
        self.hub = Hub(world_size=world, clock=lambda: self.now)
        for rank in range(joined or world):
            self.hub._ranks.join(rank, "n1", 1, self.now)

    def say(self, rank: int, message: Message) -> None:
        self.hub._on_message(self.hub._ranks.speakers((rank,)), message, self.now)


def test_the_conductor_hears_a_notice_at_once_and_behind_what_was_said_before() -> None:
    scene = Scene(2)
    scene.say(0, TIMING)
    assert heard(scene.hub) == []
    scene.say(1, NOTICE)
    assert heard(scene.hub) == [TIMING, NOTICE]
    scene.hub.close()


def test_the_conductor_hears_what_can_wait_soon_enough() -> None:
    scene = Scene(2)
    scene.say(0, TIMING)
    scene.now += 0.2
    scene.hub._tick(scene.now)
    assert heard(scene.hub) == []
    scene.now += 0.2
    scene.hub._tick(scene.now)
    assert heard(scene.hub) == [TIMING]
    scene.hub.close()


def test_a_hub_of_many_ranks_rests_only_while_nobody_waits() -> None:
    scene = Scene(1024)
    scene.now += 10.0
    assert 0 < scene.hub._rest_s() <= 0.1
    scene.say(0, TIMING)
    assert scene.hub._rest_s() > 0
    scene.say(0, NOTICE)
    assert scene.hub._rest_s() == 0, "more of it is to be expected"
    scene.now += 10.0
    assert scene.hub._rest_s() > 0
    scene.hub.time_left(10.0)
    assert scene.hub._rest_s() == 0, "answers are to be expected"
    scene.hub.close()


def test_a_hub_does_not_rest_while_ranks_join() -> None:
    """Each message of a handshake would wait for its rest: 16 s until 4,096 ranks had joined."""
    scene = Scene(1024, joined=1023)
    scene.now += 10.0
    assert scene.hub._rest_s() == 0
    scene.hub.close()


def test_a_rest_ends_when_somebody_asks_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers would wait for it else: a save is agreed sooner than a rest takes."""
    monkeypatch.setattr(hub_module, "_MANY", 1)
    monkeypatch.setattr(hub_module, "_REST_S", 60.0)
    monkeypatch.setattr(hub_module, "_LIVELY_S", 60.0)
    with hub_of(1) as hub:
        hosts, port = parse_addresses(hub.addresses)
        member = Member(
            rank=0, world_size=1, credentials=hub.credentials, hosts=hosts, port=port, host="n1",
            pid=1, on_abort=lambda _: None,
        )  # fmt: skip
        hub.request(RequestKind.SAVE, "now")
        while not isinstance(hub.events.get(timeout=20.0), TargetAgreed):
            pass
        member.close()


def test_a_hub_of_few_ranks_never_rests() -> None:
    scene = Scene(8)
    scene.now += 10.0
    assert scene.hub._rest_s() == 0
    scene.hub.close()
