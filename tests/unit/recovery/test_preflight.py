"""Who is refused for what was found before a launch."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.control.messages.preflight import Check, CheckVerdict, NodeReport, Thoroughness
from slurm_forge.journal import RunState
from slurm_forge.journal.state import AttemptState
from slurm_forge.recovery.monitor.isolation import (
    Isolated,
    Why,
)
from slurm_forge.recovery.monitor.preflight_verdict import (
    oddities,
    of_collectives,
    of_reports,
    of_silence,
    thoroughness,
)
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident, Start


def report(rank: int, *bad: str, host: str = "", torch: str = "2.6", odd: str = "") -> NodeReport:
    checks = [Check(name=name, verdict=CheckVerdict.BAD, text=f"{name} is bad") for name in bad]
    checks += [Check(name="memory", verdict=CheckVerdict.ODD, text=odd)] if odd else []
    return NodeReport(
        rank=rank, host=host or f"n{rank}", python="3.11", torch=torch, checks=tuple(checks)
    )


@pytest.mark.parametrize(
    ("check", "cause"),
    [
        ("gpu computes", Cause.GPU_ERROR),
        ("gpu memory", Cause.GPU_ERROR),
        ("gpu", Cause.GPU_ERROR),
        ("cpu computes", Cause.NODE_FAIL),
        ("storage", Cause.NODE_FAIL),
        ("answer", Cause.HANG),
    ],
)
def test_what_is_bad_on_one_node_of_four_is_that_node(check: str, cause: Cause) -> None:
    found = of_reports([report(0), report(1), report(2, check), report(3)])
    assert found is not None
    assert (found.cause, found.hosts, found.rank) == (cause, ("n2",), 2)
    assert found.evidence[0].text == f"n2 (rank 2): {check}: {check} is bad"


@pytest.mark.parametrize("check", ["gpu", "storage", "cpu computes", "gpu memory"])
def test_what_is_bad_everywhere_is_no_node(check: str) -> None:
    reports = [report(rank, check) for rank in range(4)]
    assert of_reports(reports) is None
    assert oddities(reports, {}) == (f"n0, n1, n2, n3: {check}: {check} is bad",)


def test_a_single_node_is_refused_for_what_no_program_can_do() -> None:
    assert of_reports([report(0, "gpu computes")]) is not None
    assert of_reports([report(0, "gpu")]) is None
    assert of_reports([report(0, "storage")]) is None


def test_ranks_of_one_host_are_one_node() -> None:
    reports = [report(rank, host="n0" if rank < 2 else "n1") for rank in range(4)]
    reports[1] = report(1, "gpu computes", host="n0")
    found = of_reports(reports)
    assert found is not None and found.hosts == ("n0",) and found.rank == 1


def test_another_torch_on_one_node_is_that_node() -> None:
    found = of_reports([report(0), report(1, torch="2.5"), report(2)])
    assert found is not None
    assert found.hosts == ("n1",)
    assert "torch 2.5; others have 3.11, 2.6" in found.evidence[0].text


def test_of_two_nodes_with_another_torch_nobody_can_tell_which_is_wrong() -> None:
    reports = [report(0), report(1, torch="2.5")]
    assert of_reports(reports) is None
    assert oddities(reports, {}) == (
        "n0: versions: python 3.11, torch 2.6",
        "n1: versions: python 3.11, torch 2.5",
    )
    four = [report(rank, torch="2.5" if rank < 2 else "2.6") for rank in range(4)]
    assert of_reports(four) is None


def test_many_ranks_of_one_node_are_no_majority() -> None:
    reports = [report(rank, host="n0", torch="2.5") for rank in range(8)]
    reports += [report(8, host="n1"), report(9, host="n2")]
    found = of_reports(reports)
    assert found is not None and found.hosts == ("n0",)


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.sampled_from(["gpu", "gpu computes"]))
def test_never_more_than_half_are_refused(nodes: int, bad: set[int], check: str) -> None:
    reports = [report(rank, *([check] if rank in bad else [])) for rank in range(nodes)]
    found = of_reports(reports)
    if found is not None:
        named = {f"n{rank}" for rank in bad if rank < nodes}
        assert set(found.hosts) == named
        assert nodes == 1 or 2 * len(named) <= nodes


def test_an_isolated_node_is_likely_and_a_link_is_a_guess() -> None:
    ranks = {f"n{rank}": rank for rank in range(4)}
    node = Isolated(why=Why.FOUND, nodes=("n3",))
    found = of_collectives(node, ranks, {"n3": "timed out"}, 4)
    assert found is not None
    assert (found.cause, found.confidence) == (Cause.NODE_FAIL, Confidence.LIKELY)
    assert "timed out" in found.evidence[0].text
    link = of_collectives(Isolated(why=Why.FOUND, links=(("n1", "n2"),)), ranks, {}, 4)
    assert link is not None
    assert (link.cause, link.confidence) == (Cause.NCCL_ERROR, Confidence.GUESS)
    assert link.hosts == ("n1", "n2")
    assert "n1 with n2" in link.evidence[0].text


@pytest.mark.parametrize("why", [Why.FINE, Why.EVERYBODY, Why.NOT_AGAIN, Why.AT_SCALE])
def test_nobody_is_refused_where_nobody_is_named(why: Why) -> None:
    assert of_collectives(Isolated(why=why), {}, {}, 4) is None


def test_silence_of_most_is_the_networks_or_ours() -> None:
    waited = timedelta(seconds=40)
    found = of_silence({3: "n3"}, 4, waited, frozen=True)
    assert found is not None and (found.cause, found.hosts) == (Cause.HANG, ("n3",))
    assert of_silence({2: "n2", 3: "n3"}, 4, waited, frozen=True) is None
    assert of_silence({}, 4, waited, frozen=True) is None


def test_clocks_that_differ_are_told() -> None:
    told = oddities([report(0), report(1)], {0: 0.2, 1: -61.0})
    assert told == ("n1: clock 61 s behind",)


def test_the_first_launch_is_looked_at_closely_and_a_warm_one_by_what_was_wrong() -> None:
    state = RunState()
    assert thoroughness(True, Start.COLD, state) is Thoroughness.FULL
    assert thoroughness(False, Start.COLD, state) is Thoroughness.OFF


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Cause.HANG, Thoroughness.FULL),
        (Cause.NODE_FAIL, Thoroughness.FULL),
        (Cause.APP_ERROR, Thoroughness.CHEAP),
        (Cause.CUDA_OOM, Thoroughness.CHEAP),
    ],
)
def test_a_warm_launch_is_looked_at_by_what_ended_the_last(
    cause: Cause, expected: Thoroughness
) -> None:
    incident = Incident(id="1.1", cause=cause, confidence=Confidence.LIKELY, evidence=())
    attempt = AttemptState(
        number=1, job="1", nodes=("n1",), via="sbatch", started=0.0, incidents=((1.0, incident),)
    )
    state = RunState(attempts=(attempt,))
    assert thoroughness(True, Start.WARM, state) is expected
    assert thoroughness(True, Start.COLD, state) is Thoroughness.FULL
