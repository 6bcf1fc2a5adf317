"""What a hub knows of each rank, however ranks are joined in what they say."""

from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.messages.monitor import MonitorHeartbeat
from slurm_forge.control.messages.rank import Heartbeat
from slurm_forge.control.roster import MemberView, MonitorRoster, RankRoster, Speakers

RANKS = 4


def beat(step: int) -> Heartbeat:
    return Heartbeat(turn=0, step=step, begun=step + 1, phase="train", started=True)


actions = st.one_of(
    st.tuples(st.just("beat"), st.sets(st.integers(0, RANKS - 1), min_size=1)),
    st.tuples(st.just("word"), st.sets(st.integers(0, RANKS - 1), min_size=1)),
    st.tuples(st.just("leave"), st.integers(0, RANKS - 1)),
    st.tuples(st.just("join"), st.integers(0, RANKS - 1)),
    st.tuples(st.just("ask"), st.just(0)),
)


@given(st.lists(actions, max_size=60))
def test_each_rank_is_known_by_its_own_last_words(said) -> None:
    """As if each had been kept by itself."""
    roster, expected = RankRoster(), {}
    kept: dict[tuple[int, ...], Speakers[Heartbeat, MemberView]] = {}
    for rank in range(RANKS):
        roster.join(rank, "n1", 10 + rank, 0.0)
        expected[rank] = MemberView(rank, "n1", 10 + rank, 0.0)
    for now, (what, whom) in enumerate(said, 1):
        if what in ("beat", "word"):
            ranks = tuple(sorted(whom))
            speakers = kept.setdefault(ranks, roster.speakers(ranks))
            roster.hear(speakers, now, beat(now) if what == "beat" else None)
            for rank in ranks:
                expected[rank] = expected[rank]._replace(last_message_at=now)
                if what == "beat":
                    expected[rank] = expected[rank]._replace(
                        step=now, begun=now + 1, phase="train", started=True
                    )
        elif what == "leave":
            roster.leave(whom)
            expected[whom] = expected[whom]._replace(connected=False)
        elif what == "join":
            kept.clear()  # as the hub forgets them
            roster.join(whom, "n2", 20 + whom, now)
            expected[whom] = MemberView(whom, "n2", 20 + whom, now)
        else:
            assert roster.views() == expected
    assert roster.views() == expected
    oldest = roster.oldest_message_at()
    assert oldest is not None
    assert oldest <= min(view.last_message_at for view in expected.values())
    steps = {0 if each is None else each.step for each in roster.beats()}
    assert steps == {view.step for view in expected.values()}
    assert len(roster) == RANKS


def test_who_has_never_come_has_no_place() -> None:
    roster = RankRoster()
    assert roster.oldest_message_at() is None
    assert roster.place_of(0) is None
    assert not roster.is_connected(0)


def test_a_monitor_has_its_own_part_of_what_all_of_its_node_say() -> None:
    roster = MonitorRoster()
    for rank in range(2):
        roster.join(rank, "n1", 1, 0.0)
    pulse = MonitorHeartbeat(
        turn=0, step=7, begun=8, phase_no=0, poll=0, phase="train", kind="train",
        since_s=(), mute_s=(), state=(),
    )  # fmt: skip
    assert roster.progress() is None
    roster.hear(roster.speakers((0, 1)), 3.0, pulse, ((0.5, 90.0), (0.1, 80.0), ("S", "T")))
    views = roster.views()
    assert (views[0].since_s, views[0].mute_s, views[0].state) == (0.5, 0.1, "S")
    assert (views[1].since_s, views[1].mute_s, views[1].state) == (90.0, 80.0, "T")
    assert views[0].last_message_at == views[1].last_message_at == 3.0
    assert roster.progress() == (3.0, 90.0, {"S", "T"})
