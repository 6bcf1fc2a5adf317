"""What ``doctor --live`` prints."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

from slurm_forge.cli.cluster.live_text import (
    live_json,
    live_text,
)
from slurm_forge.recovery.live_findings import findings
from slurm_forge.recovery.live_observations import (
    Fate,
    JobSeen,
    LiveSeen,
    NodeSeen,
    Receiver,
    RoundKind,
    Sighting,
    SignalRound,
)
from slurm_forge.recovery.policy.prediction import (
    JobConditions,
    predict,
)
from slurm_forge.site.model import Site

SITE = Site.model_validate({"name": "here"})

WARNING = SignalRound(
    kind=RoundKind.WARNING,
    signal="SIGUSR2",
    sightings=(
        Sighting(way=Receiver.BATCH, host="n1", fate=Fate.NOTHING),
        Sighting(way=Receiver.TASK, host="n1", fate=Fate.HEARD, signals=("SIGUSR2",), at=20.0),
        Sighting(way=Receiver.TORCHRUN, host="n1", fate=Fate.CARRIED_OFF, at=21.0),
    ),
    before_end_s=220.4,
    asked_s=200.0,
)
TERM = SignalRound(
    kind=RoundKind.STEPS_TERM,
    signal="SIGTERM",
    sightings=(
        Sighting(way=Receiver.BATCH, host="n1", fate=Fate.NOTHING),
        Sighting(way=Receiver.TASK, host="n1", fate=Fate.HEARD, at=30.0, after_s=0.034),
        Sighting(way=Receiver.TORCHRUN, host="n1", fate=Fate.ABSENT),
    ),
    sent_at=29.9,
)
REPORT = JobSeen(
    nonce="x",
    job="7",
    host="n1",
    started_at=0.0,
    ended_at=50.0,
    end_time=240.0,
    rounds=(WARNING, TERM),
    nodes=(NodeSeen(host="n1", python="/py"),),
)
SEEN = LiveSeen(job="7", partition="preempt", qos="normal", report=REPORT)
PREDICTION = predict(JobConditions())


def shown(seen: LiveSeen) -> str:
    return live_text(seen, findings(seen, PREDICTION, SITE))


def test_a_row_for_each_place_and_a_column_for_each_signal() -> None:
    lines = shown(SEEN).splitlines()
    assert lines[0] == "job 7 in partition preempt, QOS normal, on n1"
    assert lines[2].endswith("TERM, steps")
    table = {line.split("  ")[0]: line for line in lines[3:6]}
    assert "heard 220 s before" in table["task"] and table["task"].endswith("heard 0.03 s")
    assert "ended" in table["below torchrun"] and table["below torchrun"].endswith("not there")
    assert table["batch step"].split("batch step")[1].split() == ["-", "-"]


def test_what_is_wrong_stands_with_its_next_step() -> None:
    text = shown(SEEN)
    at = text.index("problem  storage  n1 can't use the folder of runs")
    assert "SLURM_FORGE_RUNS" in text[at : at + 300]


def test_no_report_says_why_and_nothing_else() -> None:
    text = live_text(replace(SEEN, report=None, problem="the job did not start\x1b[2J"), ())
    assert "the job did not start" in text and "\x1b" not in text
    assert text.count("\n") == 1


def test_the_document_has_seconds_and_an_answer() -> None:
    prediction = replace(PREDICTION, notice=timedelta(seconds=20), delay=None)
    found = findings(SEEN, prediction, SITE)
    told = json.loads(live_json(SEEN, found, prediction))
    assert told["ok"] is False
    assert (told["prediction"]["notice_s"], told["prediction"]["delay_s"]) == (20.0, None)
    assert told["seen"]["report"]["rounds"][0]["before_end_s"] == 220.4
    assert {each["mark"] for each in told["findings"]} <= {"ok", "note", "warning", "problem"}
    nothing = json.loads(live_json(replace(SEEN, report=None, problem="x"), (), None))
    assert (nothing["ok"], nothing["prediction"]) == (None, None)
