"""What is told of an incident: its evidence, the nodes it struck, and who found out about it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timezone
from pathlib import Path

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.event_lines import happening
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.status import take_status
from slurm_forge.report.status.status_text import status_text
from slurm_forge.vocabulary.cause import Cause, Evidence
from slurm_forge.vocabulary.decision import Action, Change
from slurm_forge.vocabulary.plan import RecoveryPlan
from tests.unit.report.journals import Scribe

#: Two days after the journals begin: a Thursday.
THURSDAY_14 = 1786438800.0 + 2 * 86400 + 5 * 3600
FOLLOWED = Evidence("followers", "ranks 0, 1, 3")


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path)


def told(facts: RunFacts, attempt: int | None = None) -> str:
    return explain_text(
        explain(facts), now=facts.now, reference="tiny-gpt", zone=timezone.utc, attempt=attempt
    )


def test_ranks_that_only_followed_are_told_in_short(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    evidence = (FOLLOWED, Evidence("rank 2 on n02", "SIGSEGV in libfoo"))
    scribe.incident(Cause.CRASH, Action.RELAUNCH, evidence=evidence)
    line = "rank 2 on n02: SIGSEGV in libfoo; ranks 0, 1, 3 only lost their peer   (likely)\n"
    assert line in told(scribe.facts())
    assert "followers" not in told(scribe.facts())
    assert "followers: ranks 0, 1, 3; rank 2 on n02: SIGSEGV" in told(scribe.facts(), attempt=1)


def test_the_strongest_evidence_is_told_and_all_of_it_on_request(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    evidence = tuple(Evidence(f"source {n}", f"fact {n}") for n in range(1, 7))
    scribe.incident(Cause.NODE_FAIL, Action.REQUEUE, evidence=evidence)
    text = told(scribe.facts())
    three = "source 1: fact 1; source 2: fact 2; source 3: fact 3"
    assert f"{three}; 3 more pieces with --attempt 1" in text
    assert "fact 4" not in text
    assert all(f"source {n}: fact {n}" in told(scribe.facts(), attempt=1) for n in range(1, 7))


def test_where_the_stacks_lie_is_told_without_being_asked_for(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    seen = ("watchdog: rank 1 no progress", "rank 1: loop (train.py:12)", "others: rank 0 waiting")
    said = [Evidence(*each.split(": ", 1)) for each in seen]
    stacks = Evidence("stacks", "attempts/1/stacks/1/rank-00001.txt")
    evidence = (*said, stacks, Evidence("followers", "rank 0"))
    scribe.incident(Cause.HANG, Action.RELAUNCH, evidence=evidence)
    text = " ".join(told(scribe.facts()).split())
    assert "stacks: attempts/1/stacks/1/rank-00001.txt rank 0 only lost its peer" in text
    assert "more piece" not in text


def test_what_every_launch_notes_is_told_once(scribe: Scribe) -> None:
    scribe.begin()
    for text in ("injected faults: nan@3", "another", "injected faults: nan@3"):
        scribe.write("rank0", ev.Note(text=text))
    assert told(scribe.facts()).count("note: injected faults: nan@3") == 1
    assert "more note" not in told(scribe.facts())


def test_ranks_that_are_gone_do_not_hide_what_tells_more(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    gone = tuple(Evidence(f"rank {n}", f"on n0{5 + n // 4}: gone") for n in range(8))
    evidence = (*gone, Evidence("scontrol", "FailedNode=n06"))
    scribe.incident(Cause.NODE_FAIL, Action.REQUEUE, evidence=evidence)
    line = "scontrol: FailedNode=n06; ranks 0, 1, 2, 3 on n05 gone; ranks 4, 5, 6, 7 on n06 gone"
    assert f"   {line}   (likely)\n" in told(scribe.facts())
    assert "rank 7: on n06: gone" in told(scribe.facts(), attempt=1)


def test_a_strike_for_an_earlier_attempt_is_told_with_that(scribe: Scribe) -> None:
    without_a_word(scribe)
    scribe.attempt = 2
    struck = ev.NodesStruck(nodes=("n01",), cause="node_fail", incident_id="1.1")
    scribe.write("supervisor", struck, launch=0)
    text = told(scribe.facts())
    assert text.index("n01 struck (node_fail)") < text.index("attempt 2")
    assert "launch 0" not in text


def test_nodes_that_were_struck_are_told_under_their_incident(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(Cause.HANG, Action.RELAUNCH, text="late: rank 4 (n06)")
    scribe.struck("n06", excluded=("n06",), until=THURSDAY_14)
    scribe.relaunch()
    scribe.resume(0)
    text = told(scribe.facts())
    line = "n06 struck (hang); excluded until Thu 14:00 (slurm-forge nodes list)"
    assert text.count(line) == 1
    assert text.index("late: rank 4") < text.index(line) < text.index("launch 2")


def test_some_of_the_struck_nodes_are_left_out_and_some_are_not(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(Cause.HANG, Action.RELAUNCH)
    scribe.struck("n06", "n07", excluded=("n07",), until=THURSDAY_14 + 30 * 86400)
    line = "n[06-07] struck (hang); n07 excluded until Sat 12 Sep 14:00"
    assert line in told(scribe.facts())
    struck = explain(scribe.facts()).attempts[0].launches[0].incidents[0].struck
    assert [one.excluded for one in struck] == [("n07",)]


def test_a_strike_that_leaves_nothing_out_and_one_without_its_incident(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.struck("n06", until=None)
    assert "\n  n06 struck (hang)\n" in told(scribe.facts())


def test_one_more_piece_is_one_piece(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    evidence = tuple(Evidence(f"source {n}", f"fact {n}") for n in range(1, 5))
    scribe.incident(Cause.NODE_FAIL, Action.REQUEUE, evidence=evidence)
    assert "; 1 more piece with --attempt 1 " in told(scribe.facts())


def test_what_srun_says_is_told_once_and_without_our_own_lines(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    said = "slurm_forge: launch 1.1\nslurm_forge: launch 1.1\nsrun: error: Node failure on n4"
    scribe.incident(Cause.NODE_FAIL, Action.REQUEUE, source="srun", text=said)
    for text in (told(scribe.facts()), told(scribe.facts(), attempt=1)):
        assert "   srun: error: Node failure on n4   (likely)" in text
        assert "srun: srun:" not in text and "slurm_forge: launch" not in text


def test_a_longer_limit_and_fewer_nodes_are_told_everywhere(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.save(20)
    scribe.incident(
        Cause.TIME_LIMIT,
        Action.RAISE_TIME,
        changes=(Change("time_factor", "1", "1.5"),),
        plan=RecoveryPlan(time_factor=1.5),
        step=20,
    )
    scribe.requeued()
    scribe.later(60).begin()
    scribe.resume(20)
    scribe.incident(
        Cause.NODE_FAIL,
        Action.FEWER_NODES,
        changes=(Change("nodes", "4", "3"), Change("time_factor", "1.5", "2.25")),
        plan=RecoveryPlan(time_factor=2.25, nodes=3),
    )
    text = told(scribe.facts())
    assert "    time limit x1.5 · requeued" in text
    assert "    nodes 4 → 3 · time limit x2.25 (before: x1.5) · to be started again\n" in text
    assert "your results: none." in text
    assert "Other changes: time limit x2.25; nodes 4 → 3." in text
    shown = status_text(take_status(scribe.facts()), zone=timezone.utc)
    assert "changed     time limit x2.25; on 3 nodes\n" in shown
    lesson = "request 2.25 times the time limit from the start (resources.time)"
    assert lesson not in text  # nobody knows yet whether it helps
    scribe.relaunch()
    scribe.resume(20)
    scribe.train(21, 22)
    assert lesson in told(scribe.facts())


def test_nodes_back_to_what_the_job_asks_for(scribe: Scribe) -> None:
    scribe.begin()
    scribe.resume(0)
    scribe.incident(Cause.NODE_FAIL, Action.REQUEUE, changes=(Change("nodes", "-", "3"),))
    assert "nodes as requested → 3" in told(scribe.facts())
    assert "nodes 4 → 3" in told(replace(scribe.facts(), nodes_asked=4))


def without_a_word(scribe: Scribe, action: Action | None = Action.REQUEUE) -> None:
    """The node dies at 09:03:34; Slurm starts the job again ten minutes later."""
    scribe.begin("n01")
    scribe.resume(0)
    scribe.train(1, 15)
    scribe.save(15)
    scribe.train(16, 20)
    scribe.later(600)
    scribe.found_out(Cause.NODE_FAIL, action, step=20)
    scribe.begin("n02")
    scribe.resume(15)
    scribe.train(16, 40)


def test_what_the_next_attempt_found_out_is_told_where_it_happened(scribe: Scribe) -> None:
    without_a_word(scribe)
    text = told(scribe.facts())
    assert "ended without a message" not in text
    head = "attempt 1   job 8812301   n01   Tue 11 Aug 09:00 → 09:03\n"
    assert head in text
    found = "(likely; discovered Tue 11 Aug 09:13)"
    assert f"  node_fail        09:03:34   sacct: State=NODE_FAIL   {found}\n" in text
    assert "    started again · at least 5 steps repeated, 50 s" in text
    assert "waited 10 min in the queue" in text
    assert text.index("node_fail") < text.index("attempt 2")


def test_the_figures_of_what_was_found_out_later(scribe: Scribe) -> None:
    without_a_word(scribe)
    first, second = explain(scribe.facts()).attempts
    (incident,) = first.launches[0].incidents
    assert first.last_seen == incident.time == pytest.approx(first.started + 14 + 200.3)
    assert incident.found_out == first.found_out == second.started
    assert second.waited_s == pytest.approx(600)
    assert incident.idle_rank_s == 0
    assert incident.lost_rank_s == pytest.approx(8 * (50 + 14))
    assert incident.recovered


def test_a_verdict_without_a_decision_is_told_as_well(scribe: Scribe) -> None:
    without_a_word(scribe, action=None)
    text = told(scribe.facts())
    assert "ended without a message" not in text
    assert "node_fail        09:03:34" in text


def test_in_full_the_order_of_time_stays(scribe: Scribe) -> None:
    without_a_word(scribe)
    text = told(scribe.facts(), attempt=1)
    assert text.index("09:02:44  saved") < text.index("node_fail        09:03:34")
    assert "decided: node_fail: requeue" in text


def test_a_launch_that_died_before_it_trained_and_was_looked_into(scribe: Scribe) -> None:
    scribe.begin("n01")
    scribe.later(300).found_out(Cause.NODE_FAIL, Action.REQUEUE)
    scribe.begin("n02")
    text = told(scribe.facts())
    assert "ended without a message" not in text
    assert "node_fail        09:00:00" in text
    assert "no training yet" in text


def test_new_happenings_in_a_line(scribe: Scribe) -> None:
    scribe.begin()
    scribe.incident(Cause.HANG, Action.REQUEUE, wait=240.0)
    scribe.struck("n06", excluded=("n06",), until=THURSDAY_14)
    scribe.held("hang: too often")
    lines = [happening(r, zone=timezone.utc) for r in scribe.facts().records]
    told_of = "\n".join(line for line in lines if line is not None)
    assert "decided: hang: requeue, next start in 4 min" in told_of
    assert "n06 struck (hang); excluded until Thu 14:00" in told_of
    assert "hold of job 8812301 requested: hang: too often" in told_of


def test_a_writer_that_changed_its_file_is_no_later_attempt(scribe: Scribe) -> None:
    """After a disk error the same supervisor goes on in another file."""
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 10)
    scribe.later(30).write("supervisor", ev.LaunchEnded(outcome="crash", step=10, exact=True))
    scribe.later(1).found_out(Cause.CRASH, Action.RELAUNCH, step=10)
    scribe.later(1).relaunch()
    scribe.resume(0)
    (attempt,) = explain(scribe.facts()).attempts
    assert attempt.found_out is None
    assert attempt.launches[0].incidents[0].found_out is None
