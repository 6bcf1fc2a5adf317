"""What the kernel says of connections, and what is made of it on the way to the hub."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.messages import protocol
from slurm_forge.control.messages.links import LinkReport
from slurm_forge.control.tcp.links import (
    Connection,
    Link,
    plain_address,
    read_links,
    say_links,
    summarize,
)
from slurm_forge.control.tcp.own_connections import (
    connection_of,
    own_connections,
)
from slurm_forge.control.tcp.tcp_info import (
    LISTENING,
    TcpInfo,
    parse_tcp_info,
)

#: Names and places of ``struct tcp_info`` (linux/tcp.h); all words of 32 bits.
WORDS = {
    "unacked": 24, "sent": 44, "received": 52, "acked": 56, "rtt": 68, "total_retransmits": 100,
    "notsent": 144, "min_rtt": 148,
}  # fmt: skip


def struct_of(state: int, retransmits: int, backoff: int, **words: int) -> bytes:
    data = bytearray(248)
    data[0], data[2], data[4] = state, retransmits, backoff
    for name, value in words.items():
        struct.pack_into("=I", data, WORDS[name], value)
    return bytes(data)


@given(
    state=st.integers(0, 12),
    retransmits=st.integers(0, 255),
    backoff=st.integers(0, 255),
    words=st.fixed_dictionaries({name: st.integers(1, 2**32 - 2) for name in WORDS}),
    length=st.integers(0, 300),
)
def test_whatever_a_kernel_knows_is_read_and_the_rest_is_unknown(
    state, retransmits, backoff, words, length
) -> None:
    data = struct_of(state, retransmits, backoff, **words)[:length]
    if length < 60:
        with pytest.raises(ValueError, match="tcp_info of"):
            parse_tcp_info(data)
        return
    found = parse_tcp_info(data)
    assert (found.state, found.retransmits, found.backoff) == (state, retransmits, backoff)
    assert found.unacked == words["unacked"]
    assert found.acked == words["acked"] / 1000
    assert found.rtt == (words["rtt"] / 1e6 if length >= 72 else None)
    assert found.total_retransmits == (words["total_retransmits"] if length >= 104 else None)
    assert found.min_rtt == (words["min_rtt"] / 1e6 if length >= 152 else None)


def test_no_sample_is_no_round_trip() -> None:
    found = parse_tcp_info(struct_of(1, 0, 0, min_rtt=0xFFFFFFFF))
    assert (found.rtt, found.min_rtt) == (None, None)


def info(**values: float) -> TcpInfo:
    return TcpInfo(state=1, **values)  # type: ignore[arg-type]


def test_the_worst_of_a_peer_counts_and_what_is_old_does_not() -> None:
    links = summarize(
        [
            Connection("a", "x", info(rtt=0.001, min_rtt=0.0002)),
            Connection("a", "x", info(rtt=2.0, min_rtt=0.0005)),
            Connection("a", "x", info(rtt=9.0, min_rtt=0.0004, sent=50.0, acked=0.1)),
            Connection("a", "y", info(rtt=0.001, unacked=2, retransmits=3, backoff=4, acked=2.6)),
            # Probing a full window: acknowledged, however rarely, so nothing is on its way.
            Connection("a", "z", info(rtt=0.001, backoff=6, acked=20.0, sent=20.0)),
        ]
    )
    assert links == (
        Link(peer="x", rtt=2.0, min_rtt=0.0002),
        Link(peer="y", rtt=0.001, retransmits=4, unanswered=2.6),
        Link(peer="z"),
    )


LINKS = st.builds(
    Link,
    peer=st.text(max_size=40),
    rtt=st.none() | st.integers(1, 10**9).map(lambda us: us / 1e6),
    min_rtt=st.none() | st.integers(1, 10**9).map(lambda us: us / 1e6),
    retransmits=st.integers(0, 255),
    unanswered=st.integers(0, 10**9).map(lambda ms: ms / 1e3),
)


@given(st.lists(LINKS, max_size=20), st.lists(st.text(max_size=40), max_size=4))
def test_what_is_said_is_what_is_read(links, addresses) -> None:
    line = protocol.encode(say_links(7, addresses, links, how="witness"))
    said = protocol.decode(line)
    assert isinstance(said, LinkReport)
    assert (said.id, said.how, said.addresses) == (7, "witness", tuple(addresses))
    key = str
    assert sorted(read_links(said), key=key) == sorted(links, key=key)


def test_of_a_thousand_hosts_the_bad_ones_fit_on_a_line() -> None:
    fine = [Link(peer=f"10.0.{n // 250}.{n % 250}", rtt=0.001, min_rtt=0.001) for n in range(1000)]
    bad = Link(peer="10.9.9.9", retransmits=5, unanswered=4.0)
    said = protocol.decode(protocol.encode(say_links(1, ["10.0.0.1"], [*fine, bad], how="witness")))
    assert isinstance(said, LinkReport)
    assert read_links(said)[0] == bad


def test_an_address_has_one_text() -> None:
    assert plain_address("::ffff:10.0.0.1") == plain_address("10.0.0.1") == "10.0.0.1"
    assert plain_address("fe80::1%eth0") == "fe80::1"
    assert plain_address("what") == "what"


def test_own_connections_are_those_of_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one:
            other, _ = server.accept()
            with other:
                one.sendall(b"x")
                assert other.recv(1) == b"x"
                seen = connection_of(one)
                assert seen is not None
                assert (seen.local, seen.peer, seen.info.state) == ("127.0.0.1", "127.0.0.1", 1)
                assert seen.info.rtt is not None
                everything = own_connections()
                assert len([each for each in everything if each.peer == "127.0.0.1"]) >= 2
                assert all(each.info.state != LISTENING for each in everything)
                assert connection_of(server) is None
        assert connection_of(one) is None  # closed
