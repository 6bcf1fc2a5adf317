"""Who can't be reached: one host of many, whoever looks; and nobody where nobody can tell."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.tcp.links import Link
from slurm_forge.recovery.monitor.stalls import Stall
from slurm_forge.recovery.monitor.unreachable_hosts import (
    LinkSeen,
    Trouble,
    find_unreachable_hosts,
    seen_of,
    with_network,
)
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence

FINE = Link(peer="", rtt=0.0002, min_rtt=0.0001)
CUT = Link(peer="", rtt=None, min_rtt=0.0001, retransmits=5, unanswered=4.2)
LATE = Link(peer="", rtt=2.1, min_rtt=0.0003)
IDLE = Link(peer="", rtt=None, min_rtt=0.0001)


def hosts(count: int) -> list[str]:
    return [f"n{number + 1:02d}" for number in range(count)]


def ranks(count: int, per_host: int = 1) -> dict[int, str]:
    return {r: hosts(count)[r // per_host] for r in range(count * per_host)}


def views(count: int, bad: dict[str, Link], *, silent: frozenset[str] = frozenset()):
    """Everybody looks at everybody, but ``silent`` hosts, which tell nothing."""
    return [
        LinkSeen(seer, other, bad.get(seer) or bad.get(other) or FINE)
        for seer in hosts(count)
        for other in hosts(count)
        if seer != other and seer not in silent
    ]


def hub_only(count: int, bad: set[str], link: Link, here: str = "n01"):
    """As the supervisor alone sees it."""
    return [
        LinkSeen(here, other, link if other in bad or here in bad else FINE)
        for other in hosts(count)
        if other != here
    ]


@pytest.mark.parametrize(("link", "how"), [(CUT, Trouble.CUT), (LATE, Trouble.DELAYED)])
@given(count=st.integers(3, 9), victim=st.integers(0, 8), told=st.booleans(), data=st.data())
def test_the_one_bad_host_is_named_whoever_is_asked(link, how, count, victim, told, data) -> None:
    victim %= count
    name = hosts(count)[victim]
    seen = views(count, {name: link}, silent=frozenset() if told else frozenset({name}))
    # Links that nobody used lately are not known; those of the supervisor always are.
    kept = [
        each
        for each in seen
        if "n01" in (each.seer, each.other) or data.draw(st.booleans(), label="known")
    ]
    found = find_unreachable_hosts(kept, ranks(count, 2))
    assert (found.hosts, found.how) == ((name,), how)
    assert found.ranks == (2 * victim, 2 * victim + 1)
    assert found.confidence is Confidence.LIKELY


@pytest.mark.parametrize("link", [CUT, LATE])
@given(count=st.integers(3, 40))
def test_a_supervisor_that_reaches_nobody_is_the_one(link, count) -> None:
    found = find_unreachable_hosts(hub_only(count, {"n01"}, link), ranks(count))
    assert found.hosts == ("n01",)


@given(count=st.integers(3, 40))
def test_the_supervisor_alone_names_a_host_that_it_does_not_reach(count) -> None:
    found = find_unreachable_hosts(hub_only(count, {"n02"}, CUT), ranks(count))
    assert found.hosts == ("n02",)
    assert "does not acknowledge (1 of 1 peer, 4.2 s, 5 retransmits)" in found.evidence[0].text
    assert "among the others rtt 200 us" in found.evidence[0].text or count < 3


@given(count=st.integers(2, 12), data=st.data())
def test_no_more_than_a_minority_is_named(count, data) -> None:
    links = st.sampled_from([FINE, CUT, LATE, IDLE])
    seen = [LinkSeen(a, b, data.draw(links)) for a, b in combinations(hosts(count), 2)]
    found = find_unreachable_hosts(seen, ranks(count))
    assert 2 * len(found.hosts) < count
    assert set(found.ranks) == {r for r, host in ranks(count).items() if host in found.hosts}
    if all(each.link in (FINE, IDLE) for each in seen):
        assert found.how is Trouble.NONE
        assert not found.evidence
    else:
        assert found.how is not Trouble.NONE
        assert found.evidence


@given(count=st.integers(2, 12), rtts=st.data())
def test_busy_links_are_no_trouble(count, rtts) -> None:
    """Everything below a tenth of a second, and what is as slow as it ever was."""

    def link():
        least = rtts.draw(st.floats(1e-5, 0.08))
        return Link(peer="", min_rtt=least, rtt=rtts.draw(st.floats(least, 0.099)), retransmits=1)

    seen = [LinkSeen(a, b, link()) for a, b in combinations(hosts(count), 2)]
    assert find_unreachable_hosts(seen, ranks(count)).how is Trouble.NONE
    far = Link(peer="", min_rtt=0.3, rtt=0.5)  # one host across an ocean
    assert (
        find_unreachable_hosts(views(max(count, 3), {"n02": far}), ranks(max(count, 3))).how
        is Trouble.NONE
    )


def test_of_two_hosts_nobody_can_tell() -> None:
    found = find_unreachable_hosts(views(2, {"n02": CUT}), ranks(2))
    assert (found.ranks, found.hosts, found.how) == ((), (), Trouble.CUT)
    assert "with two hosts it cannot be determined" in found.evidence[0].text


def test_a_link_between_two_that_others_reach_names_both_as_a_guess() -> None:
    seen = [
        each if {each.seer, each.other} != {"n02", "n03"} else LinkSeen(each.seer, each.other, CUT)
        for each in views(6, {})
    ]
    found = find_unreachable_hosts(seen, ranks(6))
    assert (found.hosts, found.confidence) == (("n02", "n03"), Confidence.GUESS)
    assert "n02 and n03 do not reach each other" in found.evidence[0].text


def test_halves_that_do_not_reach_each_other_name_nobody() -> None:
    left = {"n01", "n02"}
    seen = [
        LinkSeen(a, b, CUT if (a in left) != (b in left) else FINE)
        for a, b in combinations(hosts(4), 2)
    ]
    found = find_unreachable_hosts(seen, ranks(4))
    assert (found.hosts, found.how) == ((), Trouble.CUT)
    assert "not a minority" in found.evidence[-1].text


def test_two_hosts_of_many_are_both_named() -> None:
    found = find_unreachable_hosts(views(7, {"n03": CUT, "n06": LATE}), ranks(7))
    assert found.hosts == ("n03", "n06")


def test_good_links_speak_for_a_host() -> None:
    """The supervisor alone knows: of six hosts it reaches three."""
    found = find_unreachable_hosts(hub_only(6, {"n03", "n04"}, CUT), ranks(6))
    assert found.hosts == ("n03", "n04")


def test_a_delay_that_makes_no_probe_late_is_none() -> None:
    slow = Link(peer="", rtt=0.3, min_rtt=0.0003)
    assert find_unreachable_hosts(views(4, {"n02": slow}), ranks(4)).hosts == ("n02",)
    assert find_unreachable_hosts(views(4, {"n02": slow}), ranks(4), late=0.5).how is Trouble.NONE


def test_a_supervisor_beside_no_rank_is_not_named() -> None:
    found = find_unreachable_hosts(hub_only(4, {""}, CUT, here=""), ranks(4))
    assert (found.hosts, found.how) == ((), Trouble.CUT)
    assert "the supervisor's node" in found.evidence[0].text


def test_addresses_that_nobody_knows_are_left_out() -> None:
    links = [Link(peer="10.0.0.2", rtt=0.1), Link(peer="10.9.9.9", rtt=9.0), Link(peer="10.0.0.1")]
    seen = seen_of([("n01", links)], {"10.0.0.1": "n01", "10.0.0.2": "n02"})
    assert [(each.seer, each.other) for each in seen] == [("n01", "n02")]


def test_a_standstill_names_whom_the_network_names_instead() -> None:
    stall = Stall(
        cause=Cause.HANG, late_ranks=(1, 2, 3), late_hosts=("n02", "n03", "n04"), step=9,
        since=timedelta(seconds=40), limit=timedelta(seconds=30),
        evidence=(Evidence("watchdog", "silent"),),
    )  # fmt: skip
    found = find_unreachable_hosts(hub_only(4, {"n01"}, CUT), ranks(4))
    better = with_network(stall, found, ranks(4))
    assert (better.late_ranks, better.late_hosts, better.cause) == (
        (0,),
        ("n01",),
        Cause.NCCL_ERROR,
    )
    assert [each.source for each in better.evidence] == ["network", "watchdog"]
    nothing = find_unreachable_hosts(hub_only(4, set(), FINE), ranks(4))
    assert with_network(stall, nothing, ranks(4)) == stall
    two = with_network(stall, find_unreachable_hosts(views(2, {"n02": CUT}), ranks(2)), ranks(4))
    assert (two.late_ranks, two.cause) == (stall.late_ranks, Cause.HANG)
    assert two.evidence[0].source == "network"


def test_a_network_that_is_bad_everywhere_is_judged_in_a_moment() -> None:
    """The supervisor hears of nothing else meanwhile: of hundreds of hosts it took minutes."""
    count = 300
    fine = Link(peer="x", rtt=2e-4, min_rtt=1e-4)
    cut = Link(peer="x", retransmits=5, unanswered=4.0)
    seen = [
        LinkSeen(f"n{at:03}", f"n{(at + far) % count:03}", cut if (at * far) % 7 == 3 else fine)
        for at in range(count)
        for far in range(1, 11)
    ]
    before = time.process_time()
    found = find_unreachable_hosts(seen, {rank: f"n{rank:03}" for rank in range(count)})
    assert time.process_time() - before < 3.0
    assert found.how is not Trouble.NONE
    assert len(found.evidence) < 20
