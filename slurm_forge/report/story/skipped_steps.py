"""Steps whose update was skipped, by consecutive rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

from slurm_forge.journal import events as ev
from slurm_forge.report.story import story as s


def skip_rows(skips: Iterable[s.Timed[ev.StepSkipped]]) -> tuple[s.SkipStory, ...]:
    """Skipped steps in a row, put together where their samples are in a row too."""
    rows: list[s.SkipStory] = []
    for timed in skips:
        skip = timed.event
        last_sample = skip.first_sample + max(1, skip.samples) - 1
        before = rows[-1] if rows else None
        if (
            before is not None
            and skip.step == before.last_step + 1
            and skip.first_sample == before.last_sample + 1
        ):
            rows[-1] = replace(
                before,
                last_step=skip.step,
                last_sample=last_sample,
                evidence=before.evidence or skip.evidence,
            )
            continue
        rows.append(
            s.SkipStory(
                first_step=skip.step,
                last_step=skip.step,
                first_sample=skip.first_sample,
                last_sample=last_sample,
                time=timed.time,
                evidence=skip.evidence,
            )
        )
    return tuple(rows)


def rows_without_incident(launch: s.LaunchStory) -> tuple[s.SkipStory, ...]:
    """The rows of skipped steps that no incident of the launch was made of."""
    told = [row_of(launch, incident) for incident in launch.incidents]
    return tuple(row for row in launch.skipped if not any(row is each for each in told))


def row_of(launch: s.LaunchStory, incident: s.IncidentStory) -> s.SkipStory | None:
    """The row of skipped steps that an incident was made of, if it was."""
    onset, step = incident.onset, incident.step
    if onset is None or step is None:
        return None
    index = bisect_right(launch.skipped, incident.time, key=lambda row: row.time)
    row = launch.skipped[index - 1] if index else None
    if row is None or not row.first_step <= onset <= step <= row.last_step:
        return None
    return row
