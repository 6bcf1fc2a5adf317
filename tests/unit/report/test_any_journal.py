"""No journal, however wrong, keeps a report from being made, printed and parsed."""

from __future__ import annotations

import json
from typing import get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_forge.journal import Damage, Record, RunStatus
from slurm_forge.journal import events as ev
from slurm_forge.report.encoding import to_json
from slurm_forge.report.explain import explain
from slurm_forge.report.explain_text import explain_text
from slurm_forge.report.facts import RunFacts
from slurm_forge.report.happenings import happening
from slurm_forge.report.status import take_status
from slurm_forge.report.status_text import status_text

KINDS = get_args(get_args(ev.Event)[0])
#: Small steps, so that launches resume what others saved; now and then any number.
STEPS = st.integers(0, 30) | st.integers()
EVENTS = st.one_of(
    [
        st.builds(
            kind,
            **({"step": STEPS} if "step" in kind.__dataclass_fields__ else {}),
        )
        for kind in KINDS
    ]
)
TIMES = st.floats(1.7e9, 1.7e9 + 500) | st.floats()
RECORDS = st.builds(
    Record,
    attempt=st.integers(0, 3),
    launch=st.sampled_from([0, 1, 2, 1 << 30]),
    sequence=st.integers(0, 60),
    time=TIMES,
    writer=st.sampled_from(["supervisor-00000000", "rank0-00000000", "cli-00000000"]),
    event=EVENTS,
)
FACTS = st.builds(
    RunFacts,
    name=st.text(max_size=20),
    path=st.text(max_size=20),
    reference=st.text(max_size=20),
    now=TIMES,
    records=st.lists(RECORDS, max_size=40).map(tuple),
    damage=st.lists(st.builds(Damage, st.text(), st.integers(), st.text()), max_size=8).map(tuple),
    total_steps=st.none() | st.integers(1, 40),
    done=st.booleans(),
)
TESTED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def printable(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@TESTED
@given(FACTS)
def test_explain_always_tells_something_that_can_be_printed(facts: RunFacts) -> None:
    story = explain(facts)
    assert story.status in {status.value for status in RunStatus}
    assert story.goodput is None or 0 <= story.goodput <= 1
    for attempt in (None, *(one.number for one in story.attempts)):
        text = explain_text(story, now=facts.now, reference="x", attempt=attempt)
        assert printable(text)
        assert "What was changed for your science: " in text
    assert json.loads(to_json(story))["schema"] == 1


@TESTED
@given(FACTS)
def test_status_always_fits_and_names_a_next_step(facts: RunFacts) -> None:
    status = take_status(facts)
    assert printable(status_text(status))
    assert status.next
    assert json.loads(to_json(status))["status"] == status.status


@TESTED
@given(RECORDS)
def test_every_event_can_be_told_in_a_line(record: Record) -> None:
    told = happening(record)
    assert told is None or told.isprintable()
