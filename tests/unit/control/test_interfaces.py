"""Which interface a site means, by NCCL's rules, and the address on it."""

from __future__ import annotations

import socket

import pytest

from slurm_forge.control.interfaces import interface_of, interfaces, preferred_address

PRESENT = ("lo", "eth0", "eth1", "ib0", "ib0.8001", "docker0")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("ib", "ib0"),
        ("eth", "eth0"),
        ("ib,eth", "eth0"),
        ("=eth1", "eth1"),
        ("=eth", None),
        ("=ib0.8001,eth1", "eth1"),
        ("^lo,docker,eth", "ib0"),
        ("^=lo,eth0", "eth1"),
        ("hsn", None),
        ("", None),
        (" ib0 ", "ib0"),
    ],
)
def test_the_rules_of_nccl(wanted: str, found: str | None) -> None:
    assert interface_of(wanted, PRESENT) == found


@pytest.mark.skipif("lo" not in interfaces(), reason="no loopback called lo")
def test_the_address_of_an_interface_of_this_machine() -> None:
    assert preferred_address("lo", None) == "127.0.0.1"
    assert preferred_address("no-such-thing", None) is None
    assert preferred_address(None, None) is None


def test_a_name_with_the_suffix_counts_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(name: str, *rest: object) -> list[object]:
        if name != "n01-ib":
            raise socket.gaierror
        return []

    monkeypatch.setattr(socket, "gethostname", lambda: "n01.cluster.example")
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert preferred_address(None, "-ib") == "n01-ib"
    assert preferred_address("no-such-thing", "-hsn") is None
