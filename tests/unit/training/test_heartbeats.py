"""How often ranks and their monitors speak, by how many ranks there are; clocks are made up."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from pathlib import Path

import pytest

from slurm_forge.control import Member
from slurm_forge.control import member as member_module
from slurm_forge.control.clock_page import ProgressClock, new_page
from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.monitor import MonitorHeartbeat
from slurm_forge.control.messages.rank import Heartbeat
from slurm_forge.control.session import AuthenticatedConnection
from slurm_forge.run_directory import RunDirectory
from slurm_forge.training.monitor.main import RankMonitor, Subject
from tests.channel_ends import CREDENTIALS, welcomed

WORLDS = [(2047, 1), (2048, 2)]


class Page(ProgressClock):
    """Counts how often the reader says that it runs."""

    alive_count = 0

    def alive(self) -> None:
        self.alive_count += 1


@pytest.mark.parametrize(("world", "every"), WORLDS)
def test_the_monitor_of_a_rank_speaks_every_second_or_every_other(
    world: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, said = 1000.5, list[Message]()
    page = new_page()
    clock = ProgressClock(page, lambda: now)
    clock.enter("train")
    monitor = RankMonitor(
        Subject(
            pid=os.getpid(), page=page, dump=None, pidfd=None, rank=0, world_size=world, host="n1",
            credentials=CREDENTIALS, hosts=(), port=1, run=RunDirectory(tmp_path), attempt=1,
            launch=1,
        ),
        lambda: now,
    )  # fmt: skip
    monkeypatch.setattr(monitor, "_send", said.append)
    for _ in range(20):
        monitor.tick()
        now += 1.0
    assert sum(isinstance(each, MonitorHeartbeat) for each in said) == 20 / every
    os.close(page)


@pytest.mark.parametrize(("world", "every"), WORLDS)
def test_a_rank_speaks_as_often_and_its_thread_shows_every_second_that_it_runs(
    world: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "_BEAT_S", 0.01)
    turns = itertools.count()
    page = new_page()
    progress = Page(page)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends: list[AuthenticatedConnection] = []
        accepting = threading.Thread(target=lambda: ends.append(welcomed(server)))
        accepting.start()
        member = Member(
            rank=0, world_size=world, credentials=CREDENTIALS, hosts=("127.0.0.1",),
            port=server.getsockname()[1], host="n1", pid=1, on_abort=lambda _: None,
            clock=lambda: next(turns) * 0.005, progress=progress,
        )  # fmt: skip
        accepting.join()
        beats = 0
        while beats < 20:
            heard = [protocol.decode(ends[0].verify(line)) for line in ends[0].receive()]
            beats += sum(isinstance(each, Heartbeat) for each in heard)
        member.close()
    # The last of them may be on their way.
    assert 19 * every <= progress.alive_count <= 30 * every
    os.close(page)
