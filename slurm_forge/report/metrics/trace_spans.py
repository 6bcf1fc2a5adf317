"""The timeline of a run as the spans of a trace: run, attempts, and what each moment was spent on.

A run is one trace, and the same span has the same id whenever it is exported: a run that is
exported again replaces what was exported of it before, where the receiver goes by ids.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from slurm_forge.report.story.story import AttemptStory, RunStory
from slurm_forge.report.story.time_use import TimeSpan
from slurm_forge.report.text import clean

_PREFIX = "slurm_forge."
_LONGEST_TEXT = 500

AttributeValue = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Something that happened at a moment of a span."""

    name: str
    time: float
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """A span; ``id`` and ``parent`` are 64 bits, ``failed`` is why it is an error."""

    id: int
    parent: int | None
    name: str
    start: float
    end: float
    attributes: Mapping[str, AttributeValue]
    events: tuple[TraceEvent, ...] = ()
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrace:
    """The trace of a run; ``id`` is 128 bits."""

    id: int
    spans: tuple[TraceSpan, ...] = field(default=())


def run_trace(story: RunStory, *, now: float) -> RunTrace:
    """The trace of a run, up to now if it is in progress; without spans if nothing has happened.

    Args:
        story: The story that ``explain`` prints.
        now: When it was read.

    Returns:
        The run first, then its attempts, then what they did.
    """
    seed = f"{story.path}|{story.started or 0.0!r}"
    trace = RunTrace(id=_id(seed, "trace", 16))
    if not story.spans:
        return trace
    start = min(span.start for span in story.spans)
    end = max(span.end for span in story.spans)
    root = TraceSpan(
        id=_id(seed, "run"),
        parent=None,
        name=story.run,
        start=start,
        end=end,
        attributes=_known(run=story.run, path=story.path, state=story.status, step=story.step),
        failed=clean(story.reason, _LONGEST_TEXT) if story.status == "held" else "",
    )
    attempts = {each.number: _attempt(seed, root.id, each, now) for each in story.attempts}
    spans = [_use(seed, attempts.get(each.attempt, root), each) for each in story.spans]
    return RunTrace(id=trace.id, spans=(root, *attempts.values(), *spans))


def _attempt(seed: str, run: int, attempt: AttemptStory, now: float) -> TraceSpan:
    events = tuple(_events(attempt))
    last = now if not attempt.outcome else attempt.last_seen
    ends = [attempt.started, attempt.ended or last, *(each.time for each in events)]
    return TraceSpan(
        id=_id(seed, f"attempt {attempt.number}"),
        parent=run,
        name=f"attempt {attempt.number}",
        start=attempt.started,
        end=max(each for each in ends if math.isfinite(each)),
        attributes=_known(
            attempt=attempt.number,
            job=attempt.job,
            outcome=attempt.outcome,
            nodes=",".join(attempt.nodes),
        ),
        events=events,
    )


def _events(attempt: AttemptStory) -> Iterator[TraceEvent]:
    for launch in attempt.launches:
        for incident in launch.incidents:
            decision = incident.decision
            yield TraceEvent(
                name=incident.cause,
                time=incident.time,
                attributes=_known(
                    launch=launch.number,
                    step=incident.step,
                    confidence=incident.confidence,
                    hosts=",".join(incident.hosts),
                    evidence=clean("; ".join(each.text for each in incident.evidence), 500),
                    action="" if decision is None else decision.action,
                    reason="" if decision is None else clean(decision.reason, _LONGEST_TEXT),
                ),
            )
        for saved in launch.checkpoints:
            yield TraceEvent(
                name="checkpoint",
                time=saved.time,
                attributes=_known(
                    launch=launch.number,
                    step=saved.event.step,
                    checkpoint=saved.event.name,
                    seconds=saved.event.seconds,
                    size_bytes=saved.event.size,
                ),
            )


def _use(seed: str, parent: TraceSpan, span: TimeSpan) -> TraceSpan:
    key = f"{span.attempt}|{span.launch}|{span.use.value}|{span.start!r}"
    return TraceSpan(
        id=_id(seed, key),
        parent=parent.id,
        name=span.use.value,
        start=span.start,
        end=span.end,
        attributes=_known(
            attempt=span.attempt, launch=span.launch, use=span.use.value, ranks=span.ranks or None
        ),
    )


def _known(**values: AttributeValue | None) -> dict[str, AttributeValue]:
    return {
        f"{_PREFIX}{name}": value
        for name, value in values.items()
        if value is not None and value != ""
    }


def _id(seed: str, key: str, size: int = 8) -> int:
    digest = hashlib.sha256(f"{seed}|{key}".encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:size], "big") or 1
