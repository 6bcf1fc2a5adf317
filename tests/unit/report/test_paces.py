"""Slow nodes, and what got worse for everybody, as people read of them."""

from __future__ import annotations

from datetime import timezone
from pathlib import Path

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.journal.paces import NodePace
from slurm_forge.report.explain.explain import (
    explain,
    only_attempt,
)
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.event_lines import happening
from slurm_forge.report.status.report_facts import RunFacts
from slurm_forge.report.status.status import take_status
from slurm_forge.report.status.status_text import status_text
from slurm_forge.report.text import clock
from tests.unit.report.journals import Scribe

SEEN = ev.StragglerSeen(
    step=30, since_step=20, ranks=(4, 5), host="n06", factor=1.6, trial=1.58, why="node",
    lost_s=0.6,
)  # fmt: skip


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    scribe = Scribe(tmp_path)
    scribe.submitted()
    scribe.later(60).begin("n05", "n06")
    scribe.resume(0)
    scribe.train(1, 30)
    return scribe


def status(facts: RunFacts) -> str:
    return status_text(take_status(facts), zone=timezone.utc)


def told(facts: RunFacts) -> str:
    return explain_text(
        explain(facts), now=facts.now, reference="tiny-gpt", zone=timezone.utc, attempt=None
    )


def test_a_slow_node_is_one_line_of_the_status(scribe: Scribe) -> None:
    assert "slow " not in status(scribe.facts())
    scribe.write("supervisor", SEEN)
    scribe.train(31, 120)
    (line,) = [each for each in status(scribe.facts()).splitlines() if each.startswith("slow")]
    assert line == (
        "slow        n06 (ranks 4, 5) 1.60x slower than the others since step 20: the node itself "
        "(the same work takes 1.58x as long there); each step 600 ms longer (likely) · "
        "100 steps, cost all ranks 60 s"
    )


def test_explain_says_what_it_cost_and_when_it_was_over(scribe: Scribe) -> None:
    scribe.write("supervisor", SEEN)
    scribe.train(31, 60)
    over = ev.StragglerOver(step=60, host="n06", ranks=(4, 5), steps=40, lost_s=24.0)
    scribe.write("supervisor", over)
    assert "slow " not in status(scribe.facts())
    text = told(scribe.facts())
    assert "slow: n06 (ranks 4, 5) 1.60x slower than the others since step 20" in text
    assert "(likely) · 40 steps, cost all ranks 24 s · recovered 09:11:14" in text


def test_of_a_run_that_is_over_nothing_is_slow_any_more(scribe: Scribe) -> None:
    scribe.write("supervisor", SEEN)
    scribe.write("supervisor", ev.Finished(step=30))
    assert "slow " not in status(scribe.facts())


def test_a_trend_names_nobody(scribe: Scribe) -> None:
    since = scribe.now - 120
    trend = ev.TrendSeen(step=30, figure="bandwidth", was=11.8e9, now=4.1e9, since=since)
    scribe.write("supervisor", trend)
    line = "probe all-reduce bandwidth got worse: 11.8 GB/s -> 4.1 GB/s since"
    assert line in status(scribe.facts())
    assert f"{line} 09:04:14" in told(scribe.facts())
    scribe.later(600).write(
        "supervisor",
        ev.TrendSeen(step=90, figure="bandwidth", was=11.8e9, now=11.6e9, since=since, over=True),
    )
    assert line not in status(scribe.facts())
    assert "since 09:04:14, until 09:16:14" in told(scribe.facts())


def test_while_somebody_watches(scribe: Scribe) -> None:
    scribe.write("supervisor", SEEN)
    sample = ev.PaceSampled(
        step=30, world_size=8, own_s=1.0, exchange_s=0.1, trial_s=2e-4,
        nodes=(NodePace(host="n06", own=1.6, trial=1.58),),
    )  # fmt: skip
    scribe.write("supervisor", sample)
    scribe.write(
        "supervisor", ev.StragglerOver(step=60, host="n06", ranks=(4, 5), steps=40, lost_s=24.0)
    )
    lines = [line for record in scribe.facts().records if (line := happening(record))]
    assert sum("n06 (ranks 4, 5) 1.60x slower" in line for line in lines) == 1
    assert sum("n06 recovered; it cost all ranks 24 s" in x for x in lines) == 1
    assert len(only_attempt(explain(scribe.facts()), 1).attempts) == 1


def test_the_end_of_a_slow_time_names_when_it_began_as_its_beginning(scribe: Scribe) -> None:
    since = scribe.now
    event = ev.TrendSeen(step=90, figure="own", was=0.1, now=0.1, since=since, over=True)
    scribe.later(600).write("supervisor", event)
    (record,) = [each for each in scribe.facts().records if each.event == event]
    line, began = happening(record), clock(since)
    assert line is not None and line.endswith(
        f"step compute time back to normal: 100 ms (was slow since {began})"
    )


def test_words_of_a_stranger_are_cleaned(scribe: Scribe) -> None:
    odd = ev.StragglerSeen(
        step=1, since_step=0, ranks=(), host="n06\x1b[1m", factor=float("nan"),
        trial=float("inf"), why="something new",
    )  # fmt: skip
    scribe.write("supervisor", odd)
    assert "\x1b" not in status(scribe.facts()) + told(scribe.facts())
