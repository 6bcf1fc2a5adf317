"""A machine that loses power closes no connection: the cable of a real network is cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_forge.control import Hub, addresses
from slurm_forge.control.handshake import Credentials
from slurm_forge.control.hub_events import RankDisconnected, RankJoined

WITHIN_S = 30.0
OURS, THEIRS = "10.213.77.1", "10.213.77.2"

MEMBER = """
import sys, threading
from slurm_forge.control import Member
from slurm_forge.control import addresses
from slurm_forge.control.handshake import Credentials
addresses._IDLE_S, addresses._BETWEEN_S, addresses._TRIES = 1, 1, 1
over = threading.Event()
def left(reason):
    print("left:", reason, flush=True)
    over.set()
member = Member(
    rank=0, world_size=1, credentials=Credentials("right", "s"), hosts=(sys.argv[1],),
    port=int(sys.argv[2]), host="n2", pid=1, on_abort=left,
)
print("joined", flush=True)
over.wait(60)
"""


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=20)


@pytest.fixture
def other_machine() -> Iterator[str]:
    """A network namespace with one cable to us; skips where none can be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 to make a second network")
    name = f"forge-{os.getpid()}"
    cable = f"fg{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    except subprocess.CalledProcessError as error:
        ip("netns", "del", name, check=False)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip("addr", "add", f"{OURS}/30", "dev", cable)
        ip("link", "set", cable, "up")
        ip("-n", name, "addr", "add", f"{THEIRS}/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        yield name
    finally:
        ip("link", "del", cable, check=False)
        ip("netns", "del", name, check=False)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.01)


def test_both_ends_notice_that_the_other_machine_is_gone(
    other_machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("_IDLE_S", "_BETWEEN_S", "_TRIES"):
        monkeypatch.setattr(addresses, name, 1)
    said = tmp_path / "said"
    hub = Hub(world_size=1, credentials=Credentials("right", "s"))
    hub.start()
    events: list[object] = []

    def seen(kind: type) -> bool:
        with contextlib.suppress(Exception):
            while True:
                events.append(hub.events.get_nowait())
        return any(isinstance(event, kind) for event in events)

    port = hub.addresses.rpartition(":")[2]
    with said.open("w") as output:
        member = subprocess.Popen(
            ["ip", "netns", "exec", other_machine, sys.executable, "-c", MEMBER, OURS, port],
            stdout=output,
        )
    try:
        until(lambda: seen(RankJoined), "the rank")
        assert not seen(RankDisconnected)
        ip("link", "set", f"fg{os.getpid()}", "down")
        until(lambda: seen(RankDisconnected), "the hub to notice")
        until(lambda: "left: the hub is gone" in said.read_text(), "the rank to notice")
    finally:
        member.kill()
        member.wait()
        hub.close()
