"""Who sits where: healthy nodes keep their seats, spare ones take those of the lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.nodes.placement import (
    AllocationState,
    Placement,
    launch_nodes,
    lost_nodes,
    place_ranks,
    suspected_nodes,
)
from slurm_forge.slurm.records import NodeRecord
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident

NODES = tuple(f"n{number}" for number in range(1, 13))


def take(
    allocation: int,
    wanted: int,
    *,
    before: tuple[str, ...] = (),
    unusable: tuple[str, ...] = (),
    suspected: tuple[str, ...] = (),
) -> tuple[str, ...] | None:
    found = place_ranks(
        NODES[:allocation],
        wanted=wanted,
        tasks_per_node=2,
        before=before,
        unusable=unusable,
        suspected=suspected,
    )
    return None if found is None else found.nodes


def incident(cause: Cause, *hosts: str, repeats: bool | None = None) -> Incident:
    return Incident(
        id="1.1", cause=cause, confidence=Confidence.LIKELY, hosts=hosts, repeats=repeats
    )


def test_at_first_the_last_nodes_are_spare() -> None:
    found = place_ranks(NODES[:4], wanted=3, tasks_per_node=2)
    assert found is not None
    assert (found.nodes, found.spares, found.tasks) == (("n1", "n2", "n3"), ("n4",), 6)
    assert found.in_order
    assert not found.everywhere


def test_the_spare_node_takes_the_seat_and_nobody_else_moves() -> None:
    assert take(4, 3, before=("n1", "n2", "n3"), unusable=("n2",)) == ("n1", "n4", "n3")


def test_a_second_loss_takes_the_second_spare() -> None:
    assert take(5, 3, before=("n1", "n4", "n3"), unusable=("n2", "n4")) == ("n1", "n5", "n3")


def test_with_no_spare_left_there_are_no_seats() -> None:
    assert take(4, 3, before=("n1", "n4", "n3"), unusable=("n2", "n3")) is None


def test_fewer_ranks_go_where_ranks_were() -> None:
    assert take(4, 2, before=("n1", "n4", "n3"), unusable=("n1",)) == ("n3", "n4")
    assert take(5, 2, before=("n1", "n5", "n3"), unusable=("n2",)) == ("n1", "n5")


def test_a_doubted_node_waits_while_there_is_another_and_works_where_there_is_none() -> None:
    assert take(4, 3, suspected=("n2",)) == ("n1", "n3", "n4")
    assert take(4, 3, before=("n1", "n2", "n3"), suspected=("n2",)) == ("n1", "n4", "n3")
    assert take(3, 3, before=("n1", "n2", "n3"), suspected=("n2",)) == ("n1", "n2", "n3")
    # Of two doubted ones the worse waits.
    assert take(4, 3, suspected=("n4", "n1")) == ("n1", "n2", "n3")


def test_what_has_moved_in_words() -> None:
    def at(*nodes: str) -> Placement:
        return Placement(nodes=nodes, tasks_per_node=1, allocation=NODES[:5])

    before = at("n1", "n2", "n3")
    assert at("n1", "n4", "n3").moved(before) == "n[1,3] + spare n4"
    assert at("n1", "n3").moved(before) == "n[1,3]"
    assert at("n3", "n2", "n1").moved(before) == ""


@given(
    size=st.integers(1, 12),
    wanted=st.integers(1, 12),
    lost=st.lists(st.sets(st.sampled_from(NODES), max_size=3), max_size=5),
    bad=st.lists(st.sampled_from(NODES), unique=True, max_size=6),
)
def test_launch_after_launch(size: int, wanted: int, lost: list[set[str]], bad: list[str]) -> None:
    """Never on a lost node, never one twice, and nobody moves who need not."""
    allocation, gone, before = NODES[:size], set[str](), ()
    for news in [set[str](), *lost]:
        gone |= news
        found = place_ranks(
            allocation,
            wanted=wanted,
            tasks_per_node=1,
            before=before,
            unusable=gone,
            suspected=bad,
        )
        usable = [node for node in allocation if node not in gone]
        if found is None:
            assert len(usable) < wanted
            return
        assert len(found.nodes) == wanted == len(set(found.nodes))
        assert set(found.nodes) | set(found.spares) == set(usable)
        assert not set(found.nodes) & set(found.spares)
        sound_spares = set(found.spares) - set(bad)
        assert not sound_spares or not set(found.nodes) & set(bad), "a better one is idle"
        kept = [node for node in before if node in found.nodes]
        assert all(found.nodes.index(node) == before.index(node) for node in kept)
        replaced = [node for node in before if node not in found.nodes]
        assert all(node in gone for node in replaced) or bad
        before = found.nodes


def test_how_many_nodes_a_launch_takes() -> None:
    assert launch_nodes(4, 0, None) == 4
    assert launch_nodes(4, 1, None) == 3
    assert launch_nodes(4, 1, 2) == 2
    assert launch_nodes(3, 1, 3) == 2, "an allocation that came smaller than the plan says"


def test_what_speaks_against_a_node() -> None:
    seen = (
        incident(Cause.HANG, "n3"),
        incident(Cause.APP_ERROR, "n1"),
        incident(Cause.NON_FINITE, "n4", repeats=False),
        incident(Cause.NODE_FAIL, "n2"),
    )
    records = (
        NodeRecord(name="n5", state=("ALLOCATED", "DRAIN")),
        NodeRecord(name="n6", state=("ALLOCATED",)),
    )
    assert suspected_nodes(seen, ("n7", "n3"), records) == ("n5", "n2", "n4", "n3", "n7")
    assert lost_nodes(seen) == {"n2"}


def test_room() -> None:
    room = AllocationState(nodes=("n1", "n2", "n3", "n4"), wanted=3, outlives=True)
    assert room.suffices(["n2"])
    assert not room.suffices(["n2", "n3"])
    assert room.suffices(["elsewhere"])
