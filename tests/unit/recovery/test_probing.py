"""Who is named by silence and by a probe, and who never is."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.monitor.phase_durations import HangRules
from slurm_forge.recovery.monitor.probe_verdict import (
    NOTHING,
    AskNetwork,
    Fine,
    Flight,
    Nothing,
    Off,
    ProbeFailure,
    ProbeRules,
    RankSeen,
    Suspended,
    blamed,
    weigh_probe,
    weigh_silence,
)
from slurm_forge.recovery.nodes.statements import Strike
from slurm_forge.recovery.nodes.strikes import strikes_of
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident

RULES = ProbeRules(silence=timedelta(seconds=5), deadline=timedelta(seconds=30))


def ranks(count: int = 4, per_host: int = 1) -> list[RankSeen]:
    return [
        RankSeen(
            rank=rank,
            host=f"n{rank // per_host}",
            silent_s=0.5,
            monitor_silent_s=0.5,
            state="S",
            limit=30.0,
        )
        for rank in range(count)
    ]


def but(seen: list[RankSeen], *which: int, **changes: object) -> list[RankSeen]:
    return [replace(s, **changes) if s.rank in which else s for s in seen]  # type: ignore[arg-type]


# -- silence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["T", "Z", "X"])
def test_a_stopped_process_is_named_once_it_was_silent_for_long_enough(state: str) -> None:
    almost = but(ranks(), 2, silent_s=4.9, state=state)
    assert isinstance(weigh_silence(almost, RULES), Nothing)
    found = weigh_silence(but(ranks(), 2, silent_s=5.1, state=state), RULES)
    assert isinstance(found, ProbeFailure)
    assert (found.ranks, found.hosts, found.cause) == ((2,), ("n2",), Cause.HANG)
    assert found.confidence is Confidence.LIKELY


def test_a_process_in_the_kernel_has_the_deadline() -> None:
    assert isinstance(weigh_silence(but(ranks(), 2, silent_s=29.0, state="D"), RULES), Nothing)
    found = weigh_silence(but(ranks(), 2, silent_s=30.0, state="D"), RULES)
    assert isinstance(found, ProbeFailure)
    assert found.ranks == (2,)


@pytest.mark.parametrize("state", ["R", "S"])
def test_a_process_that_holds_the_interpreters_lock_is_left_to_the_watchdog(state: str) -> None:
    seen = but(ranks(), 2, silent_s=3600.0, state=state)
    assert isinstance(weigh_silence(seen, RULES), Nothing)


@pytest.mark.parametrize("world", [1, 4])
def test_a_launch_all_of_whose_interpreters_are_held_is_not_suspended(world: int) -> None:
    seen = [replace(each, silent_s=60.0, state="R") for each in ranks(world)]
    assert isinstance(weigh_silence(seen, RULES), Nothing)


def test_a_suspension_that_goes_round_the_hosts_slowly_blames_nobody() -> None:
    """Two seconds from one to the next; their witnesses saw them stop."""
    for now in range(5, 60):
        seen = [
            RankSeen(
                rank=n,
                host=f"n{n}",
                silent_s=max(0.3, now - 2.0 * n),
                monitor_silent_s=0.3,
                state="T",
            )
            if now > 2 * n
            else RankSeen(rank=n, host=f"n{n}", silent_s=0.3, monitor_silent_s=0.3, state="S")
            for n in range(4)
        ]
        assert isinstance(weigh_silence(seen, RULES), (Nothing, Suspended)), now


def test_a_debugger_keeps_everybody_from_being_judged() -> None:
    seen = but(but(ranks(), 2, silent_s=100.0, state="T"), 1, state="t", silent_s=100.0)
    assert isinstance(weigh_silence(seen, RULES), Nothing)


@pytest.mark.parametrize("per_host", [1, 2])
def test_a_host_that_says_nothing_at_all_is_named_after_the_network_was_asked(
    per_host: int,
) -> None:
    dark = (0,) if per_host == 1 else (0, 1)
    quiet = but(ranks(8, per_host), *dark, silent_s=9.0, monitor_silent_s=9.0)
    assert isinstance(weigh_silence(quiet, RULES), Nothing)
    asked = weigh_silence(but(quiet, *dark, silent_s=10.0, monitor_silent_s=10.0), RULES)
    assert asked == AskNetwork(Nothing()), "a kernel that answers is given time"
    asked = weigh_silence(but(quiet, *dark, silent_s=30.0, monitor_silent_s=30.0), RULES)
    assert isinstance(asked, AskNetwork)
    assert isinstance(asked.otherwise, ProbeFailure)
    assert (asked.otherwise.ranks, set(asked.otherwise.hosts)) == (dark, {"n0"})
    assert asked.otherwise.silent


def test_of_two_hosts_the_silent_one_is_a_guess() -> None:
    asked = weigh_silence(but(ranks(2), 1, silent_s=31.0, monitor_silent_s=31.0), RULES)
    assert isinstance(asked, AskNetwork)
    assert isinstance(asked.otherwise, ProbeFailure)
    assert asked.otherwise.confidence is Confidence.GUESS


def test_where_most_are_silent_the_network_says_who_and_else_nobody_is_named() -> None:
    """The host of whoever listens is cut off: all others seem to be gone."""
    seen = but(ranks(), 1, 2, 3, silent_s=12.0, monitor_silent_s=12.0)
    assert weigh_silence(seen, RULES) == AskNetwork(Nothing())
    late = weigh_silence(but(seen, 1, 2, 3, silent_s=31.0, monitor_silent_s=31.0), RULES)
    assert isinstance(late, AskNetwork)
    assert isinstance(late.otherwise, ProbeFailure)
    assert late.otherwise.ranks == ()


def test_a_rank_without_a_witness_has_the_deadline() -> None:
    soon = weigh_silence(but(ranks(), 3, silent_s=29.0, monitor_silent_s=None), RULES)
    assert soon == AskNetwork(NOTHING), "only the network may name it"
    found = weigh_silence(but(ranks(), 3, silent_s=31.0, monitor_silent_s=None), RULES)
    assert isinstance(found, AskNetwork)
    assert isinstance(found.otherwise, ProbeFailure)
    assert found.otherwise.ranks == (3,)


def test_where_most_are_silent_those_without_a_witness_are_not_to_blame() -> None:
    """The supervisor's own host is cut off; one was silent a bit longer than the others."""
    seen = but(ranks(6, 2), 2, silent_s=31.0, monitor_silent_s=None)
    seen = but(seen, 3, 4, 5, silent_s=30.0, monitor_silent_s=9.0)
    found = weigh_silence(seen, RULES)
    assert isinstance(found, AskNetwork)
    assert isinstance(found.otherwise, ProbeFailure)
    assert found.otherwise.ranks == ()


def test_ranks_whose_witness_sees_them_run_do_not_make_a_silent_host_less_to_blame() -> None:
    seen = but(ranks(), 0, 1, silent_s=40.0)  # in C code, and their processes run
    asked = weigh_silence(but(seen, 2, silent_s=31.0, monitor_silent_s=31.0), RULES)
    assert isinstance(asked, AskNetwork)
    assert isinstance(asked.otherwise, ProbeFailure)
    assert asked.otherwise.ranks == (2,)


silences = st.floats(0, 1000)
views = st.lists(
    st.builds(
        RankSeen,
        rank=st.just(0),
        host=st.sampled_from(["a", "b", "c"]),
        silent_s=silences,
        monitor_silent_s=st.none() | silences,
        state=st.sampled_from([*list("RSDTtZ"), ""]),
    ),
    min_size=1,
    max_size=8,
).map(lambda made: [replace(each, rank=rank) for rank, each in enumerate(made)])


@given(views)
def test_who_talks_is_never_named_for_silence_nor_all_at_once(seen: list[RankSeen]) -> None:
    verdict = weigh_silence(seen, RULES)
    if not any(each.talks for each in seen):
        # A job is suspended with its witnesses, and what they see is stopped.
        runs = any(each.has_monitor and each.state not in ("T", "Z") for each in seen)
        assert isinstance(verdict, Nothing if runs else Suspended)
        return
    found = verdict.otherwise if isinstance(verdict, AskNetwork) else verdict
    if isinstance(found, ProbeFailure):
        named = [each for each in seen if each.rank in found.ranks]
        assert all(each.silent_s >= 5.0 for each in named)
        assert len(named) < len(seen)
        assert found.hosts == tuple(each.host for each in named)
        assert not any(each.has_monitor and each.state in ("R", "S", "t") for each in named)


@given(
    offsets=st.lists(st.floats(0, 1.0), min_size=2, max_size=6),
    after=st.floats(0, 100),
    step=st.floats(0.05, 0.5),
    silence=st.floats(4.0, 10.0),
)
def test_ranks_of_a_suspended_job_that_fall_silent_together_are_not_blamed(
    offsets: list[float], after: float, step: float, silence: float
) -> None:
    """Each said its last word within a second of the others, and witnesses saw them stop."""
    rules = ProbeRules(timedelta(seconds=silence), timedelta(seconds=2))
    now = 1.0
    while now < after + 1.0:
        seen = [
            RankSeen(rank=rank, host="n0", silent_s=now - at, monitor_silent_s=0.3, state="T")
            for rank, at in enumerate(offsets)
        ]
        assert not isinstance(weigh_silence(seen, rules), (ProbeFailure, AskNetwork))
        now += step


# -- a probe under way -----------------------------------------------------------------------------


def flight(*arrived: int, done: tuple[int, ...] = (), **more: object) -> Flight:
    return Flight(
        asked_at=100.0,
        arrived={rank: 100.0 + rank for rank in arrived},
        latency={rank: 0.5 - 0.1 * rank for rank in done},
        **more,  # type: ignore[arg-type]
    )


def test_a_fine_probe_says_what_the_last_to_come_saw() -> None:
    everybody = (0, 1, 2, 3)
    bandwidth = {rank: 1e9 * (4 - rank) for rank in everybody}
    given = flight(*everybody, done=everybody, bandwidth=bandwidth)
    fine = weigh_probe(given, ranks(), RULES, 105.0)
    assert isinstance(fine, Fine)
    assert fine.latency_s == pytest.approx(0.2)
    assert fine.bandwidth == pytest.approx(1e9)


@pytest.mark.parametrize("phase", ["eval", "save", "load", "start", "a phase of theirs"])
def test_a_rank_that_is_elsewhere_for_a_reason_is_not_late(phase: str) -> None:
    seen = but(ranks(), 3, phase=phase, since=5000.0)
    assert isinstance(weigh_probe(flight(0, 1, 2), seen, RULES, 5000.0), Nothing)


def test_a_rank_within_its_learned_limit_is_not_late_however_long_it_takes() -> None:
    seen = but(ranks(), 3, since=2000.0, limit=2400.0)
    assert isinstance(weigh_probe(flight(0, 1, 2), seen, RULES, 129.0), Nothing)
    assert weigh_probe(flight(0, 1, 2), seen, RULES, 2100.0) == AskNetwork(Nothing())


def test_a_rank_that_talks_and_does_not_come_is_late_after_ten_deadlines() -> None:
    seen = but(ranks(), 3, since=300.0)
    assert weigh_probe(flight(0, 1, 2), seen, RULES, 399.0) == AskNetwork(Nothing())
    found = weigh_probe(flight(0, 1, 2), seen, RULES, 401.0)
    assert isinstance(found, ProbeFailure)
    assert (found.ranks, found.silent) == ((3,), False)


def test_who_computes_or_compiles_has_no_less_time_than_the_watchdog_grants() -> None:
    """That one looks at the stacks before it says that somebody is late."""
    rules = replace(RULES, hang=HangRules(5.0, timedelta(seconds=30), timedelta(minutes=10)))
    seen = but(ranks(), 3, since=1700.0)
    assert weigh_probe(flight(0, 1, 2), seen, rules, 100.0 + 1790.0) == AskNetwork(Nothing())
    assert isinstance(weigh_probe(flight(0, 1, 2), seen, rules, 100.0 + 1810.0), ProbeFailure)


def test_all_came_and_it_does_not_end_asks_the_network() -> None:
    everybody = (0, 1, 2, 3)
    given = flight(*everybody, done=(0, 1))
    assert isinstance(weigh_probe(given, ranks(), RULES, 132.0), Nothing)
    assert weigh_probe(given, ranks(), RULES, 134.0) == AskNetwork(Nothing())
    late = weigh_probe(given, ranks(), RULES, 404.0)
    assert isinstance(late, AskNetwork)
    assert isinstance(late.otherwise, ProbeFailure)
    assert late.otherwise.ranks == (), "two of four are no minority"


@pytest.mark.parametrize("gpu", [False, True])
def test_a_training_that_goes_on_outlives_its_probe(gpu: bool) -> None:
    seen = but(ranks(), 0, 1, 2, 3, step=44)
    ask = weigh_probe(flight(0, 1, 2, 3, step=40, gpu=gpu), seen, RULES, 140.0)
    assert isinstance(ask, AskNetwork)
    assert isinstance(ask.otherwise, Off)


def test_steps_that_are_queued_for_a_gpu_that_hangs_are_no_training_that_goes_on() -> None:
    stuck = but(but(ranks(), 0, 1, 2, 3, step=44), 2, since=30.0)
    ask = weigh_probe(flight(0, 1, 2, 3, step=40, gpu=True), stuck, RULES, 140.0)
    assert isinstance(ask, AskNetwork)
    assert isinstance(ask.otherwise, ProbeFailure)


def test_on_a_gpu_a_long_step_may_be_before_it() -> None:
    seen = but(ranks(), 0, limit=600.0)
    given = flight(0, 1, 2, 3, gpu=True)
    assert weigh_probe(given, seen, RULES, 600.0) == AskNetwork(Nothing())


@given(st.integers(3, 9), st.data())
def test_a_wrong_value_names_its_sender_and_a_wrong_reading_its_reader(
    world: int, data: st.DataObject
) -> None:
    bad = data.draw(st.integers(0, world - 1))
    sent = dict.fromkeys(range(world), (bad,))
    if data.draw(st.booleans()):
        sent[bad] = ()  # it may find its own value right
    assert blamed(sent, world) == ((bad,), True)
    read = dict.fromkeys(range(world), ()) | {
        bad: tuple(rank for rank in range(world) if rank != bad)
    }
    assert blamed(read, world) == ((bad,), False)


def test_a_wrong_sender_is_certain_and_weighs_enough_to_be_left_out() -> None:
    everybody = (0, 1, 2, 3)
    given = flight(*everybody, done=everybody, wrong=dict.fromkeys(everybody, (2,)))
    found = weigh_probe(given, ranks(), RULES, 105.0)
    assert isinstance(found, ProbeFailure)
    assert (found.ranks, found.hosts, found.wrong) == ((2,), ("n2",), True)
    assert (found.cause, found.confidence) == (Cause.NCCL_ERROR, Confidence.CERTAIN)
    incident = Incident(
        id="1.1",
        cause=found.cause,
        confidence=found.confidence,
        evidence=found.evidence,
        hosts=found.hosts,
    )
    nodes = [each.host for each in ranks()]
    (strike,) = strikes_of(incident, run="r", nodes=nodes, time=0.0, by="a")
    assert isinstance(strike, Strike)
    assert (strike.node, strike.weight) == ("n2", 1.5)


def test_values_that_are_wrong_everywhere_blame_nobody() -> None:
    everybody = (0, 1, 2, 3)
    given = flight(*everybody, done=everybody, wrong=dict.fromkeys(everybody, everybody))
    found = weigh_probe(given, ranks(), RULES, 105.0)
    assert isinstance(found, ProbeFailure)
    assert (found.ranks, found.wrong) == ((), True)
