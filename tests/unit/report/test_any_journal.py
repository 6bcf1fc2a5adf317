"""No journal, however wrong, keeps a report from being made, printed and parsed."""

from __future__ import annotations

import json
import math
from typing import get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_forge.journal import Damage, Record, RunStatus
from slurm_forge.journal import events as ev
from slurm_forge.report.encoding import to_json
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.explain.explain_text import explain_text
from slurm_forge.report.status.event_lines import happening
from slurm_forge.report.status.report_facts import (
    NotStarted,
    RunFacts,
)
from slurm_forge.report.status.status import take_status
from slurm_forge.report.status.status_text import status_text
from slurm_forge.report.story.queue_reason import QueueAnswer
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.vocabulary.cause import Evidence
from slurm_forge.vocabulary.decision import Change, Decision, Incident
from slurm_forge.vocabulary.plan import RecoveryPlan, SampleWindow

KINDS = get_args(get_args(ev.Event)[0])
TIMES = st.floats(1.7e9, 1.7e9 + 500) | st.floats()
#: Small steps, so that launches resume what others saved; now and then any number.
STEPS = st.integers(0, 30) | st.integers()
NAMES = st.sampled_from(["step-00000010.a1.l1-00000000", "step-00000000.a1.l1-00000000", "x\x1b"])
#: A few ids, so that decisions, costs and incidents meet.
IDS = st.sampled_from(["1.1", "1.1.1", "1.1.2", ""])
FACTORS = st.sampled_from([1.0, 0.5, 0.25]) | st.floats()
EVIDENCE = st.lists(
    st.builds(
        Evidence,
        st.sampled_from(["all ranks", "replay", "rank 9 (n05)", "followers"]) | st.text(max_size=5),
        st.sampled_from(["transient; suspect n05, n06", "data; dataset[7], [9]"]) | st.text(),
    ),
    max_size=5,
).map(tuple)
WINDOWS = st.builds(SampleWindow, st.integers(), st.integers())
PLANS = st.builds(
    RecoveryPlan,
    lr_factor=FACTORS,
    lr_from_step=STEPS,
    lr_ramp_steps=STEPS,
    micro_batch=st.none() | st.integers(),
    mem_factor=FACTORS,
    exclude_nodes=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    skipped=st.lists(WINDOWS, max_size=6).map(tuple),
    reseeded=st.integers(0, 3),
    worker_factor=FACTORS,
    time_factor=FACTORS,
    nodes=st.none() | st.integers(),
)
CHANGES = st.lists(
    st.builds(
        Change,
        st.sampled_from(
            [
                "lr_scale",
                "micro_batch",
                "skipped_samples",
                "mem_factor",
                "worker_factor",
                "reseeded",
                "exclude_nodes",
                "time_factor",
                "nodes",
                "dropout",
            ]
        ),
        st.sampled_from(["-", "1", "3-8, 9-12", "nan"]) | st.text(max_size=8),
        st.sampled_from(["0.5", "2", "inf"]) | st.text(max_size=8),
    ),
    max_size=3,
).map(tuple)
INCIDENTS = st.builds(
    Incident,
    id=IDS,
    evidence=EVIDENCE,
    step=st.none() | STEPS,
    hosts=st.lists(st.sampled_from(["n05", "n\x1b"]), max_size=2).map(tuple),
    onset=st.none() | STEPS,
    window=st.none() | WINDOWS,
    repeats=st.none() | st.booleans(),
)
DECISIONS = st.builds(
    Decision,
    incident_id=IDS,
    reason=st.sampled_from(["x: on_instability: y", "x: nothing left; next: z"]) | st.text(),
    plan=PLANS,
    changes=CHANGES,
    target=st.none() | NAMES,
    wait_s=st.floats(),
)
JOBS = st.sampled_from(["12", "15_3", "local-1", "x\x1b", ""])
NODES = st.lists(st.sampled_from(["n05", "n06", "n\x1b"]), max_size=2).map(tuple)
FIELDS = {
    "step": STEPS,
    "incident": INCIDENTS,
    "decision": DECISIONS,
    "evidence": EVIDENCE,
    "incident_id": IDS,
    "name": NAMES,
    "checkpoint": st.none() | NAMES,
    "text": st.just("allocator retries: many") | st.text(),
    "job": JOBS,
    "successor": st.none() | JOBS,
    "method": st.sampled_from(["scontrol requeue", "scontrol requeuehold", "scontrol update"]),
    "nodes": NODES,
    "excluded": NODES,
    "until": st.none() | TIMES,
    "world_size": st.sampled_from([0, 4, 8]) | st.integers(),
    "outcome": st.sampled_from(["finished", "requeued", "hold", "crash"]) | st.text(max_size=5),
    "verb": st.sampled_from(["requeue", "stop"]) | st.text(max_size=5),
}
EVENTS = st.one_of(
    [
        st.builds(
            kind,
            **{name: FIELDS[name] for name in kind.__dataclass_fields__ if name in FIELDS},
        )
        for kind in KINDS
    ]
)
RECORDS = st.builds(
    Record,
    attempt=st.integers(0, 3),
    launch=st.sampled_from([0, 1, 2, 1 << 30]),
    sequence=st.integers(0, 60),
    time=TIMES,
    writer=st.sampled_from(
        ["supervisor-00000000", "supervisor-00000001", "rank0-00000000", "cli-00000000"]
    ),
    event=EVENTS,
)
WHEN = st.none() | st.datetimes()
REASONS = st.sampled_from(
    ["Priority", "BeginTime", "JobHeldUser", "JobHeldAdmin", "Dependency", "QOSMaxJobs_x", None]
)
QUEUED = st.builds(
    JobRecord,
    job_id=st.just(12),
    name=st.text(max_size=5),
    state=st.sampled_from(JobState),
    state_text=st.text(max_size=5),
    reason=REASONS | st.text(max_size=9),
    dependency=st.none() | st.text(max_size=9),
    priority=st.none() | st.integers(0, 3),
    start_time=WHEN,
    eligible_time=WHEN,
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
    memory=st.none() | st.integers(0, 1 << 50),
    global_batch=st.none() | st.integers(1, 1 << 20),
    done=st.booleans(),
    gpus_per_rank=st.none() | st.floats(0, 16),
    nodes_asked=st.none() | st.integers(),
    not_started=st.lists(st.builds(NotStarted, JOBS, TIMES, st.text()), max_size=2).map(tuple),
    queue=st.none() | st.builds(QueueAnswer, JOBS, st.none() | QUEUED),
    last_written=st.none() | TIMES,
    claimed=st.none() | TIMES,
    asked=st.none() | TIMES,
    gone_here=st.just("") | JOBS,
)
TESTED = settings(suppress_health_check=[HealthCheck.too_slow])


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
        assert "Changes that affect your results:" in text
    assert story.repeated_steps >= 0
    assert min(story.waited_s, story.lost_rank_s, story.idle_rank_s, story.rest_s) >= 0
    assert story.repeated_s <= story.training_s + 1e-3 or not math.isfinite(story.training_s)
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
