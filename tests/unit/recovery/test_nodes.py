"""Which nodes are left out, and for how long."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.nodes.exclusion import excluded_by_ledger, spared
from slurm_forge.recovery.nodes.score import NodeScore, node_scores
from slurm_forge.recovery.nodes.statements import BY_HAND, Ledger, NodeRelease, NodeRules, Strike
from slurm_forge.recovery.nodes.strikes import strikes_of
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident

NOW = 1_800_000_000.0
HOUR = 3600.0
DAY = 24 * HOUR
RULES = NodeRules()
NODES = [f"n{number:02d}" for number in range(20)]
CAUSES = ["hang", "crash", "gpu_error", "node_fail"]


def strike(
    node: str = "n06",
    age: float = 0.0,
    cause: str = "hang",
    weight: float = 0.75,
    run: str = "/runs/a",
    incident: str = "",
    by: str = "ann",
) -> Strike:
    return Strike(
        node=node, time=NOW - age, weight=weight, cause=cause, run=run, incident_id=incident, by=by
    )


def by_hand(node: str = "n06", age: float = 0.0, until: float | None = None) -> Strike:
    return Strike(node=node, time=NOW - age, weight=1.0, cause=BY_HAND, by="ann", until=until)


def standing(
    *strikes: Strike, now: float = NOW, releases: tuple[NodeRelease, ...] = ()
) -> NodeScore:
    found = {each.node: each for each in node_scores(Ledger(strikes, releases), now, RULES)}
    return found["n06"]


def names(
    *strikes: Strike,
    nodes: list[str] | None = NODES,
    needed: int = 1,
    now: float = NOW,
    excluded: tuple[str, ...] = (),
    spared: tuple[str, ...] = (),
    releases: tuple[NodeRelease, ...] = (),
) -> list[str]:
    found = excluded_by_ledger(
        Ledger(strikes, releases),
        now,
        RULES,
        partition=nodes,
        needed=needed,
        excluded=excluded,
        spared=spared,
    )
    return [each.node for each in found]


strikes = st.builds(
    Strike,
    node=st.sampled_from(NODES),
    time=st.floats(NOW - 20 * DAY, NOW),
    weight=st.floats(0.05, 1.9),
    cause=st.sampled_from(CAUSES),
    run=st.sampled_from(["/runs/a", "/runs/b"]),
    incident_id=st.sampled_from(["", "1.1", "1.2", "2.1"]),
    by=st.sampled_from(["ann", "bob"]),
)
people = st.builds(by_hand, node=st.sampled_from(NODES), age=st.floats(0, 20 * DAY))
ledgers = st.lists(strikes | people, max_size=40).map(tuple)


# How much is enough


def test_the_network_gets_a_second_chance_and_no_third() -> None:
    assert names(strike()) == []
    assert names(strike(incident="1.1", age=2 * DAY), strike(incident="1.2")) == ["n06"]
    # What was long ago counts for little.
    assert names(strike(incident="1.1", age=9 * DAY), strike(incident="1.2")) == []


def test_an_authority_is_enough_for_about_three_days() -> None:
    lost = strike(cause="node_fail", weight=1.9)
    found = standing(lost)
    assert found.convicted
    assert found.until is not None
    assert 2.5 * DAY < found.until - NOW < 3 * DAY
    assert names(lost, now=found.until - 60) == ["n06"]
    assert names(lost, now=found.until + 60) == []


def test_a_person_is_enough_by_themselves_until_released_or_until_then() -> None:
    assert names(by_hand(age=300 * DAY)) == ["n06"]
    assert standing(by_hand()).until is None
    until = NOW + 2 * DAY
    assert standing(by_hand(until=until)).until == until
    assert names(by_hand(until=until), now=until - 1) == ["n06"]
    assert names(by_hand(until=until), now=until) == []


def test_what_runs_saw_outlasts_a_person_who_struck_for_an_hour() -> None:
    short = by_hand(until=NOW + HOUR)
    lost = strike(cause="node_fail", weight=1.9)
    assert standing(short, lost).until == standing(lost).until
    assert standing(short, by_hand(until=NOW + 9 * DAY), lost).until == NOW + 9 * DAY


def test_a_release_clears_what_was_before_it_and_nothing_after() -> None:
    old = (by_hand(age=5 * HOUR), strike(age=4 * HOUR, weight=1.9, cause="gpu_error"))
    release = NodeRelease(node="n06", time=NOW - 3 * HOUR)
    assert names(*old) == ["n06"]
    assert names(*old, releases=(release,)) == []
    again = strike(age=2 * HOUR, weight=1.9, cause="gpu_error", incident="2.1")
    assert names(*old, again, releases=(release,)) == ["n06"]
    assert names(*old, releases=(replace(release, node="n07"),)) == ["n06"]
    assert names(*old, releases=(release, replace(release, time=NOW - DAY))) == []


# What one program can do


def test_a_program_that_crashes_everywhere_convicts_no_node() -> None:
    everywhere = [
        strike(node, age=number * 60.0, cause="crash", weight=0.4, incident=f"{number}.{again}")
        for again in range(5)
        for number, node in enumerate(NODES)
    ]
    assert names(*everywhere) == []
    # The same on one node alone is enough, where it was more than one run.
    assert names(*(replace(each, node="n06") for each in everywhere)) == []
    several = [replace(each, node="n06", run=f"/runs/{i % 3}") for i, each in enumerate(everywhere)]
    assert names(*several) == ["n06"]


def test_a_program_that_fails_again_where_it_is_started_again_convicts_no_node() -> None:
    for cause in ("crash", "hang", "nccl_error"):
        again = [strike(age=600.0 * i, cause=cause, incident=f"1.{i}") for i in range(20)]
        assert names(*again) == []
        assert len(standing(*again).strikes) == 20, "they are listed all the same"
    later = [strike(age=7 * HOUR * i, incident=f"1.{i}") for i in range(2)]
    assert names(*later) == ["n06"]


def test_the_heaviest_stands_for_what_a_run_repeats() -> None:
    guess = strike(age=2 * HOUR, weight=0.35, incident="1.1")
    sure = strike(age=HOUR, weight=0.75, incident="1.2")
    assert standing(guess, sure).score == pytest.approx(standing(sure).score)


def test_bad_nodes_protect_each_other_in_no_way() -> None:
    """What a driver or Slurm says of a node is no matter of what other nodes do."""
    for cause in ("gpu_error", "node_fail"):
        both = [
            strike(node, age=600.0 * i, cause=cause, weight=1.5, incident=f"{node}.{i}")
            for node in ("n06", "n11")
            for i in range(5)
        ]
        assert sorted(names(*both)) == ["n06", "n11"]
    guesses = [
        strike(node, cause="gpu_error", weight=0.5, run=f"/runs/{i}", incident="1.1")
        for node in ("n06", "n11", "n12")
        for i in range(3)
    ]
    assert names(*guesses) == []


def test_many_runs_of_one_person_are_one_witness() -> None:
    sweep = [
        strike(node, cause="crash", weight=0.4, run=f"/runs/{run}", incident="1.1")
        for run in range(10)
        for node in NODES
    ]
    assert names(*sweep) == []


def test_a_bad_node_stands_out_of_what_happens_elsewhere() -> None:
    lemon = [strike(incident="1.1", run=f"/runs/{i}", age=i * HOUR) for i in range(3)]
    assert names(*lemon, strike("n11", incident="1.9")) == ["n06"]


def test_a_sweep_that_crashes_frees_no_node_that_hangs() -> None:
    lemon = [strike(incident="1.1", run=f"/runs/{i}", age=i * HOUR) for i in range(2)]
    sweep = [
        strike(node, cause="crash", weight=0.4, run=f"/runs/{node}", incident="1.1")
        for node in NODES
    ]
    assert names(*lemon, *sweep) == ["n06"]


@given(
    st.lists(
        st.tuples(st.sampled_from(NODES), st.floats(0, 6 * HOUR), st.floats(0.05, 1.9)), max_size=60
    )
)
def test_one_witness_convicts_at_most_one_node_in_a_few_hours(
    seen: list[tuple[str, float, float]],
) -> None:
    said = tuple(
        strike(node, age=age, weight=weight, incident=str(number))
        for number, (node, age, weight) in enumerate(seen)
    )
    found = node_scores(Ledger(said), NOW, RULES)
    assert sum(each.convicted for each in found) <= 1


# Who says it


def test_a_release_of_anybody_clears_what_all_have_said() -> None:
    lost = [strike(cause="node_fail", weight=1.9, by=name) for name in ("ann", "bob")]
    assert names(*lost, by_hand()) == ["n06"]
    assert names(*lost, by_hand(), releases=(NodeRelease(node="n06", time=NOW, by="eve"),)) == []


def test_a_release_can_not_clear_what_has_not_happened() -> None:
    ahead = NodeRelease(node="n06", time=NOW + 500, by="ann")
    fresh = replace(strike(cause="node_fail", weight=1.9), time=NOW + 1)
    assert names(fresh, releases=(ahead,)) == ["n06"]


def test_hands_take_nothing_of_the_share_of_runs() -> None:
    many = [f"n{number:02d}" for number in range(60)]  # six may be excluded
    flood = [by_hand(node) for node in many[:20]]
    assert len(names(*flood, nodes=many)) == 20
    saw = [strike(node, cause="node_fail", weight=1.9) for node in many[40:]]
    assert len(names(*flood, *saw, nodes=many)) == 26
    assert len(names(*flood, *saw, nodes=many, needed=50)) == 10


# What a plan leaves out


def test_a_plan_leaves_out_only_what_the_job_can_do_without() -> None:
    four = ["n1", "n2", "n3", "n4"]
    assert spared(("n3", "n1"), four, 2) == ("n1", "n3")
    assert spared(("n3", "n1"), four, 3) == ("n1",)
    assert spared(("n3", "n1"), four, 3, newest=("n3",)) == ("n3",)
    assert spared(("n3", "n1"), four, 4) == ()
    assert spared(("n3", "n1"), four, 9) == ()
    # Where it is not known which there are the plan holds; one that is gone takes no place.
    assert spared(("n3", "n1"), None, 9) == ("n1", "n3")
    assert spared(("gone", "n1"), four, 3, newest=("gone",)) == ("n1",)
    assert spared(("n3", "n1"), four, 2, excluded=("n4",)) == ("n1",)
    assert spared(("n3", "n4"), four, 2, excluded=("n4",)) == ("n3",)


@given(st.lists(st.sampled_from(NODES)), st.integers(1, 25), st.lists(st.sampled_from(NODES)))
def test_enough_are_always_left(plan: list[str], needed: int, other: list[str]) -> None:
    out = spared(plan, NODES, needed, newest=plan[:1], excluded=other)
    assert not out or len(set(NODES) - set(out) - set(other)) >= needed
    assert set(out) <= set(plan)


# What holds for any ledger


@given(
    ledgers, st.integers(1, 40), st.integers(1, 40), st.lists(st.sampled_from(NODES), max_size=5)
)
def test_the_cap_is_never_exceeded(
    said: tuple[Strike, ...], size: int, needed: int, own: list[str]
) -> None:
    partition = [f"n{number:02d}" for number in range(size)]
    found = names(*said, nodes=partition, needed=needed, excluded=tuple(own))
    mine = {each.node for each in said if each.cause == BY_HAND}
    assert len(set(found) - mine) <= max(1, size // 10)
    left = set(partition) - set(found) - set(own)
    assert not found or len(left) >= needed
    assert set(found) <= set(partition) - set(own)
    assert len(names(*said, nodes=None)) <= RULES.most_unknown


def test_the_cap_bites_and_the_worst_go_first() -> None:
    worst = [
        strike(node, weight=1.0 + number / 25, cause="node_fail", by=f"user{number}")
        for number, node in enumerate(NODES)
    ]
    assert names(*worst) == ["n19", "n18"]
    # What a person struck themselves takes nothing of the share, only of what the job can spare.
    assert names(*worst, by_hand("n03")) == ["n03", "n19", "n18"]
    five = [by_hand(node) for node in NODES[:5]]
    assert names(*five) == NODES[:5]
    assert names(*five, needed=17) == NODES[:3]
    assert names(*worst, nodes=None) == ["n19", "n18", "n17", "n16"]
    assert names(*worst, needed=19) == ["n19"]
    assert names(*worst, needed=20) == []
    assert names(*worst, needed=19, excluded=("n01",)) == []
    assert names(*worst, nodes=["n03", "other"]) == ["n03"]
    assert names(*worst, spared=("n19",)) == ["n18", "n17"]


@given(ledgers, st.lists(st.floats(0, 40 * DAY), min_size=2, max_size=5))
def test_nothing_gets_worse_by_waiting(said: tuple[Strike, ...], waits: list[float]) -> None:
    before: dict[str, float] = {}
    for wait in sorted(waits):
        scores = {each.node: each.score for each in node_scores(Ledger(said), NOW + wait, RULES)}
        for node, score in scores.items():
            assert score <= before.get(node, score) + 1e-9
        before = scores


@given(ledgers)
def test_until_is_when_it_ends(said: tuple[Strike, ...]) -> None:
    for each in node_scores(Ledger(said), NOW, RULES):
        if not each.convicted:
            assert each.until is None
        elif each.until is not None:
            later = {s.node: s for s in node_scores(Ledger(said), each.until + 1, RULES)}
            assert not later[each.node].convicted
            earlier = {s.node: s for s in node_scores(Ledger(said), each.until - 5, RULES)}
            assert earlier[each.node].convicted or each.until - 5 < NOW


@given(ledgers, st.randoms(use_true_random=False))
def test_neither_order_nor_doubles_matter(said: tuple[Strike, ...], random) -> None:
    mixed = [*said, *said]
    random.shuffle(mixed)
    assert node_scores(Ledger(tuple(mixed)), NOW, RULES) == node_scores(Ledger(said), NOW, RULES)


@given(st.floats(0, DAY), st.integers(2, 6))
def test_an_incident_counts_once_however_often_it_is_told(gap: float, times: int) -> None:
    once = strike(incident="1.1", age=DAY)
    told = [replace(once, time=once.time + gap * number / times) for number in range(times)]
    assert standing(*told).score == pytest.approx(standing(once).score)
    other = [replace(each, run=f"/runs/{number}") for number, each in enumerate(told)]
    assert standing(*other).score > standing(once).score


@given(ledgers, st.lists(st.sampled_from(NODES), max_size=5))
def test_released_nodes_are_used(said: tuple[Strike, ...], freed: list[str]) -> None:
    releases = tuple(NodeRelease(node=node, time=NOW) for node in freed)
    assert not set(names(*said, releases=releases)) & set(freed)


@given(ledgers)
def test_what_is_listed_is_what_was_said(said: tuple[Strike, ...]) -> None:
    found = node_scores(Ledger(said), NOW, RULES)
    assert {each.node for each in found} == {each.node for each in said}
    assert all(count == 1 for count in Counter(each.node for each in found).values())


def test_rules_can_be_other_ones() -> None:
    strict = replace(RULES, threshold=0.5, half_life=timedelta(days=30))
    found = excluded_by_ledger(
        Ledger((strike(age=10 * DAY),)), NOW, strict, partition=NODES, needed=1
    )
    assert [(each.node, each.causes) for each in found] == [("n06", ("hang",))]
    assert found[0].last == NOW - 10 * DAY


# What an incident says


def incident(cause: Cause, *hosts: str, **more: object) -> Incident:
    values = {"confidence": Confidence.LIKELY, **more}
    return Incident(id="1.1", cause=cause, hosts=hosts, **values)  # type: ignore[arg-type]


def weights(given: Incident, nodes: list[str] = NODES) -> dict[str, float]:
    found = strikes_of(given, run="/runs/a", nodes=nodes, time=NOW, by="ann")
    assert all(each.incident_id == "1.1" and each.cause == given.cause.value for each in found)
    return {each.node: each.weight for each in found}


SPEAKS = {
    Cause.GPU_ERROR, Cause.NODE_FAIL, Cause.HANG, Cause.NCCL_ERROR, Cause.CRASH, Cause.STRAGGLER,
    Cause.RANK_MISMATCH,
}  # fmt: skip


@pytest.mark.parametrize("cause", Cause)
def test_only_causes_that_can_be_a_nodes_fault_strike_one(cause: Cause) -> None:
    assert bool(weights(incident(cause, "n06"))) == (cause in SPEAKS)


def test_how_many_incidents_convict_a_node() -> None:
    def needed(cause: Cause, confidence: Confidence) -> int:
        for count in range(1, 10):
            said = [
                each
                for number in range(count)
                for each in strikes_of(
                    replace(incident(cause, "n06", confidence=confidence), id=f"1.{number}"),
                    run=f"/runs/{number}", nodes=NODES, time=NOW - number * HOUR, by="ann",
                )
            ]  # fmt: skip
            if names(*said):
                return count
        return 10

    assert needed(Cause.GPU_ERROR, Confidence.CERTAIN) == 1
    assert needed(Cause.NODE_FAIL, Confidence.LIKELY) == 1
    assert needed(Cause.HANG, Confidence.LIKELY) == 2
    assert needed(Cause.GPU_ERROR, Confidence.GUESS) == 3
    assert needed(Cause.CRASH, Confidence.LIKELY) == 3
    assert needed(Cause.STRAGGLER, Confidence.LIKELY) == 4
    assert needed(Cause.STRAGGLER, Confidence.GUESS) == 10


def test_arithmetic_that_was_wrong_once_is_the_nodes_fault() -> None:
    assert weights(incident(Cause.NON_FINITE, "n06", repeats=False)) == {"n06": 0.75}
    assert weights(incident(Cause.NON_FINITE, "n06", repeats=True)) == {}
    assert weights(incident(Cause.NON_FINITE, "n06")) == {}


def test_several_names_share_what_is_said() -> None:
    assert weights(incident(Cause.HANG, "n06", "n07", "n06")) == {"n06": 0.375, "n07": 0.375}
    # Slurm has lost both of these.
    assert weights(incident(Cause.NODE_FAIL, "n06", "n07")) == {"n06": 1.5, "n07": 1.5}


def test_all_nodes_of_the_job_are_none() -> None:
    assert weights(incident(Cause.HANG, "n06", "n07"), ["n06", "n07"]) == {}


def test_a_job_of_one_node_says_half_of_what_programs_do_themselves() -> None:
    assert weights(incident(Cause.HANG, "n06"), ["n06"]) == {"n06": 0.375}
    assert weights(incident(Cause.CRASH, "n06"), ["n06"]) == {"n06": 0.2}
    assert weights(incident(Cause.GPU_ERROR, "n06"), ["n06"]) == {"n06": 1.5}
    wrong = incident(Cause.NON_FINITE, "n06", repeats=False)
    assert weights(wrong, ["n06"]) == {"n06": 0.75}


def test_only_nodes_of_the_job_are_struck() -> None:
    assert weights(incident(Cause.HANG, "login1", "n06")) == {"n06": 0.75}
