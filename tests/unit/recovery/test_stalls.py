from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.stack_text import Where
from slurm_forge.recovery.monitor.phase_durations import (
    HangRules,
    PhaseDurations,
)
from slurm_forge.recovery.monitor.stalls import (
    Excused,
    Look,
    RankView,
    Stall,
    Standstill,
    find_standstill,
    judge,
)
from slurm_forge.vocabulary.cause import Cause

WAITING = Where(together=True, call="all_reduce", top="all_reduce (distributed_c10d.py:1)")
SLEEPING = Where(top="loop (train.py:12)")


def known() -> PhaseDurations:
    """A run whose steps take a second: 30 s are too long."""
    phase_durations = PhaseDurations(HangRules(5.0, timedelta(seconds=30), timedelta(minutes=10)))
    for kind, seconds in (("train", 1.0), ("data", 0.1), ("eval", 60.0), ("save", 5.0)):
        for _ in range(5):
            phase_durations.note(kind, seconds)
    return phase_durations


def at(rank: int, since: float, step: int = 12, **more: object) -> RankView:
    given = {"kind": "train", "phase": "train", "state": "S", **more}
    begun = given.pop("begun", step + 1)
    return RankView(
        rank=rank,
        host=f"n{rank}",
        place=(0, step, begun, 1, 0),  # type: ignore[arg-type]
        step=step,
        since=timedelta(seconds=since),
        **given,  # type: ignore[arg-type]
    )


def look(where: Where | None = SLEEPING, *, at: float = 0.0, **more: object) -> Look:
    given = {"state": "S", "cpu_s": 1.0, "text": "x", "file": "f", **more}
    return Look(at=at, where=where, **given)  # type: ignore[arg-type]


def judged(
    views: list[RankView], first: dict[int, Look], second: dict[int, Look] | None = None
) -> Stall | Excused:
    found = find_standstill(views, known())
    assert found is not None
    both = {view.rank: view for view in views}
    return judge(found, both, first, first if second is None else second, known())


# -- whether anybody stands still ---------------------------------------------------------------


def test_all_within_their_limits() -> None:
    assert find_standstill([at(0, 20), at(1, 25)], known()) is None


def test_one_hangs_and_the_others_wait_for_it() -> None:
    found = find_standstill([at(0, 40), at(1, 41, begun=12)], known())
    assert found == Standstill((1,), (0, 1), timedelta(seconds=30), timedelta(seconds=41))


def test_a_rank_that_evaluates_alone_is_waited_for() -> None:
    """The others are over the limit of a step: they wait for what is within its own."""
    views = [at(0, 100, kind="eval", phase="eval", begun=12), at(1, 90), at(2, 90)]
    assert find_standstill(views, known()) is None


def test_a_slow_rank_that_gets_on_is_no_hang() -> None:
    assert find_standstill([at(0, 40), at(1, 3, begun=12)], known()) is None


def test_a_rank_behind_while_others_go_on_stands_still() -> None:
    found = find_standstill([at(0, 2, step=30), at(1, 40, step=12)], known())
    assert found is not None and found.furthest_behind == (1,)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_stopped_or_silent_at_once_is_a_suspended_job(world: int) -> None:
    views = [at(rank, 500, state="T", is_silent=rank % 2 == 1) for rank in range(world)]
    assert find_standstill(views, known()) is None


def test_one_stopped_is_a_hang() -> None:
    assert find_standstill([at(0, 500, state="T"), at(1, 500)], known()) is not None


def test_a_debugger_stops_the_clock() -> None:
    assert find_standstill([at(0, 500, state="t"), at(1, 500)], known()) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 2000), st.sampled_from(["train", "eval", "odd"])),
        min_size=1,
        max_size=6,
    )
)
def test_nobody_within_the_limit_is_ever_named(ranks: list[tuple[int, float, str]]) -> None:
    views = [
        at(rank, since, step=step, kind=kind) for rank, (step, since, kind) in enumerate(ranks)
    ]
    found = find_standstill(views, known())
    phase_durations = known()
    for rank in () if found is None else found.over:
        assert views[rank].since > phase_durations.limit(views[rank].kind)
        within = [v.place for v in views if v.since <= phase_durations.limit(v.kind)]
        assert all(place > views[rank].place for place in within)


# -- who, and why -------------------------------------------------------------------------------


def test_who_is_not_in_the_collective_is_late() -> None:
    stall = judged(
        [at(0, 40), at(1, 40), at(2, 40)], {0: look(WAITING), 1: look(), 2: look(WAITING)}
    )
    assert isinstance(stall, Stall)
    assert (stall.late_ranks, stall.late_hosts, stall.cause) == ((1,), ("n1",), Cause.HANG)
    texts = [f"{each.source}: {each.text}" for each in stall.evidence]
    assert texts == [
        "watchdog: rank 1 (n1) no progress for 40 s in train at step 12 (train took up to 1.0 s "
        "before, limit 30 s)",
        "rank 1: loop (train.py:12)",
        "others: ranks 0, 2 waiting in all_reduce",
        "stacks: f",
    ]


def test_short_steps_and_large_numbers_are_readable() -> None:
    phase_durations = PhaseDurations(HangRules(5.0, timedelta(seconds=30), timedelta(minutes=10)))
    for _ in range(5):
        phase_durations.note("train", 0.0034)
    views = [at(0, 40, step=9831), at(1, 40, step=9831)]
    found = find_standstill(views, phase_durations)
    assert found is not None
    looks = {0: look(WAITING), 1: look()}
    stall = judge(found, {view.rank: view for view in views}, looks, looks, phase_durations)
    assert isinstance(stall, Stall)
    assert "in train at step 9831 (train took up to 3 ms before" in stall.evidence[0].text


def test_all_in_one_collective_names_nobody() -> None:
    stall = judged([at(0, 40), at(1, 40)], {0: look(WAITING), 1: look(WAITING)})
    assert isinstance(stall, Stall) and stall.late_ranks == ()
    assert stall.evidence[0].text.startswith("all ranks inside all_reduce: no progress for 40 s")


def test_a_frozen_process_is_late_whoever_is_behind() -> None:
    views = [at(0, 40, begun=12), at(1, 40, state="T")]
    stall = judged(views, {0: look(WAITING), 1: look(None, state="T")})
    assert isinstance(stall, Stall) and stall.late_ranks == (1,)
    assert "stopped (state T)" in stall.evidence[1].text


def test_a_silent_rank_is_late() -> None:
    stall = judged([at(0, 40), at(1, 40, is_silent=True)], {0: look(WAITING)})
    assert isinstance(stall, Stall) and stall.late_ranks == (1,)


def test_without_any_stack_the_last_in_the_program_is_late() -> None:
    stall = judged([at(0, 40), at(1, 40, begun=12)], {})
    assert isinstance(stall, Stall) and stall.late_ranks == (1,)


def test_waiting_for_the_disk_is_a_matter_of_storage() -> None:
    views = [at(0, 40), at(1, 40, state="D")]
    stall = judged(views, {0: look(WAITING), 1: look(None, state="D")})
    assert isinstance(stall, Stall) and stall.cause is Cause.STORAGE
    saving = Where(saving=True, top="write (shardfile.py:8)")
    views = [at(0, 300, kind="save", phase="save"), at(1, 300, kind="save", phase="save")]
    stall = judged(views, {0: look(WAITING), 1: look(saving)})
    assert isinstance(stall, Stall) and (stall.cause, stall.late_ranks) == (Cause.STORAGE, (1,))


def test_the_data_loader_is_told() -> None:
    stuck = Where(loading=True, top="get (queue.py:1) in next_step (fetching.py:2)")
    views = [at(0, 40), at(1, 40, kind="data", phase="data", begun=12)]
    stall = judged(views, {0: look(WAITING), 1: look(stuck)})
    assert isinstance(stall, Stall) and stall.cause is Cause.HANG
    assert stall.evidence[1].text.endswith("in the data loader")


def test_a_held_interpreter_lock_is_told() -> None:
    views = [at(0, 40), at(1, 40, no_python_for=timedelta(seconds=39))]
    stall = judged(views, {0: look(WAITING), 1: look()})
    assert isinstance(stall, Stall)
    assert "no Python thread of it ran for 39 s" in stall.evidence[1].text


# -- patience -----------------------------------------------------------------------------------


def pair(rate: float, changed: bool) -> tuple[dict[int, Look], dict[int, Look]]:
    """Two looks, two seconds apart, at a rank that computes and one that waits for it."""
    after = look(at=2.0, cpu_s=1.0 + 2 * rate, text="y" if changed else "x")
    return {0: look(WAITING), 1: look()}, {0: look(WAITING, at=2.0), 1: after}


@pytest.mark.parametrize("changed", [True, False])
def test_a_rank_that_computes_is_given_time(changed: bool) -> None:
    verdict = judged([at(0, 40), at(1, 40)], *pair(0.9, changed))
    assert isinstance(verdict, Excused) and verdict.until == timedelta(seconds=80)
    late = judged([at(0, 601), at(1, 601)], *pair(0.9, changed))
    assert isinstance(late, Stall) and late.late_ranks == (1,)


def test_a_rank_that_only_waits_is_not() -> None:
    assert isinstance(judged([at(0, 40), at(1, 40)], *pair(0.02, True)), Stall)
    assert isinstance(judged([at(0, 40), at(1, 40)], *pair(0.2, False)), Stall)


def test_on_a_crowded_node_a_little_will_do() -> None:
    assert isinstance(judged([at(0, 40), at(1, 40)], *pair(0.2, True)), Excused)


def test_waiting_for_a_device_computes_too_but_its_stack_stays() -> None:
    """All ranks of a NCCL hang spin inside .item(): nobody is at work."""
    spinning = Where(top="item (guard.py:3)")
    before = {r: look(spinning) for r in (0, 1)}
    after = {r: look(spinning, at=2.0, cpu_s=3.0) for r in (0, 1)}
    stall = judged([at(0, 40), at(1, 40)], before, after)
    assert isinstance(stall, Stall) and stall.late_ranks == ()


def test_compiling_is_given_more() -> None:
    compiling = Where(compiling=True, top="compile (_dynamo.py:1)")
    looks = {0: look(WAITING), 1: look(compiling)}
    assert isinstance(judged([at(0, 700), at(1, 700)], looks), Excused)
    assert isinstance(judged([at(0, 1801), at(1, 1801)], looks), Stall)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 29.0, 31.0, 299.0, 301.0, 5000.0]),
            st.integers(10, 13),
            st.sampled_from(["train", "data", "eval", "save", "first train", "unseen"]),
            st.sampled_from("SRDTtZ"),
            st.booleans(),
        ),
        max_size=7,
    )
)
def test_who_stands_still_is_found_as_if_all_were_compared_with_all(
    ranks: list[tuple[float, int, str, str, bool]],
) -> None:
    views = [
        at(rank, since, step, kind=kind, state=state, is_silent=silent)
        for rank, (since, step, kind, state, silent) in enumerate(ranks)
    ]
    durations = known()
    found = find_standstill(views, durations)
    over = [view for view in views if view.since > durations.limit(view.kind)]
    at_work = [view.place for view in views if view not in over]
    stuck = [view for view in over if not any(place <= view.place for place in at_work)]
    suspended = all(view.is_silent or view.state in ("T", "t") for view in views)
    debugged = any(view.state == "t" and not view.is_silent for view in views)
    if suspended or debugged or not stuck:
        assert found is None
        return
    assert found is not None
    lowest = min(view.place for view in stuck)
    first = [view for view in stuck if view.place == lowest]
    assert found.over == tuple(view.rank for view in stuck)
    assert found.furthest_behind == tuple(view.rank for view in first)
    assert found.limit == min(durations.limit(view.kind) for view in first)
    assert found.since == min(view.since for view in first)
