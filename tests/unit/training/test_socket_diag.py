"""Connections of another process, by the kernel; and what ports have counted."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.training.monitor.netlink import (
    connections_of,
    own_addresses,
    parse_addresses_dump,
    parse_dump,
)
from slurm_forge.training.monitor.port_counters import (
    PortCounters,
    differences,
    read_counters,
)

PROGRAM = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
one.sendall(b"x")
sys.stdin.read()
"""


@pytest.fixture
def peer():
    """A process with one connection to us, and our end of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port)], stdin=subprocess.PIPE
        )
        ours, address = server.accept()
        with ours:
            assert ours.recv(1) == b"x"
            yield program, address[1], port
        program.kill()
        program.communicate()


def test_the_connection_of_a_stopped_process_is_told_by_the_kernel(peer) -> None:
    program, port, _ = peer
    os.kill(program.pid, signal.SIGSTOP)
    found = connections_of(program.pid)
    if found is None:
        pytest.skip("this kernel does not tell of sockets")
    assert [(each.local, each.peer, each.info.state) for each in found] == [
        ("127.0.0.1", "127.0.0.1", 1)
    ]
    assert found[0].info.rtt
    if shutil.which("ss") is None:
        return
    # As iproute2 reads the same structure; the figures do not change while nothing is sent.
    command = ["ss", "-tniH", f"sport = :{port}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rtt, _ = re.search(r" rtt:([0-9.]+)/([0-9.]+)", said).groups()  # type: ignore[union-attr]
    assert found[0].info.rtt == pytest.approx(float(rtt) / 1e3)
    least = re.search(r"minrtt:([0-9.]+)", said)
    if least is not None:
        assert found[0].info.min_rtt == pytest.approx(float(least[1]) / 1e3)
    assert "unacked" not in said
    assert found[0].info.unacked == 0


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    assert connections_of(2**22 + 1) is None


def test_own_addresses_leave_out_the_loopback() -> None:
    found = own_addresses()
    assert "127.0.0.1" not in found
    assert "::1" not in found


@given(st.binary(max_size=400))
def test_what_is_no_answer_is_read_as_nothing_much(data) -> None:
    for each in (*parse_dump(data), *parse_addresses_dump(data)):
        assert each  # and nothing is raised


# -- counters of ports -----------------------------------------------------------------------------


def sysfs(folder: Path, downed: int, crc: int) -> Path:
    counters = folder / "class/infiniband/mlx5_0/ports/1/counters"
    statistics = folder / "class/net/eth0/statistics"
    for each in (counters, statistics, folder / "class/net/eth0/device"):
        each.mkdir(parents=True, exist_ok=True)
    (counters / "link_downed").write_text(f"{downed}\n")
    (counters / "symbol_error").write_text("what\n")
    (statistics / "rx_crc_errors").write_text(f"{crc}\n")
    virtual = folder / "class/net/veth0/statistics"
    virtual.mkdir(parents=True, exist_ok=True)
    (virtual / "rx_crc_errors").write_text("5\n")
    return folder


def test_counters_are_compared_with_those_of_the_start(tmp_path: Path) -> None:
    ports = PortCounters(sysfs(tmp_path, downed=1, crc=10))
    ports._thread.join()
    assert ports.counted() is None
    sysfs(tmp_path, downed=2, crc=40)
    ports.read_again(7)
    ports._thread.join()
    answer = ports.counted()
    assert answer is not None
    assert answer.number == 7
    assert answer.lines == ("eth0 rx_crc_errors +30", "mlx5_0/1 link_downed +1")
    assert ports.counted() is None


def test_a_host_without_any_has_none(tmp_path: Path) -> None:
    assert read_counters(tmp_path) == {}
    assert differences({"a": 3, "b": 9}, {"a": 1, "c": 4, "b": 9}) == ()
