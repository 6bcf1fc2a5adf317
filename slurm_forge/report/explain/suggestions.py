"""What would have made a run smoother: advice at its end, for the next one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from slurm_forge.journal import RunStatus
from slurm_forge.recovery.policy.remedies import remedy
from slurm_forge.report.story.diagnosis import faults_on_purpose, suspects
from slurm_forge.report.story.plan_text import (
    factor,
    memory_times,
)
from slurm_forge.report.story.skipped_steps import row_of
from slurm_forge.report.story.story import (
    IncidentStory,
    LaunchStory,
    RunStory,
)
from slurm_forge.report.text import clean, first_line, plural, span
from slurm_forge.vocabulary.cause import Cause

#: More repeated work than this, in time and as a share of the training, is worth a line.
_REPEATED_S = 60.0
_REPEATED_SHARE = 0.02
#: A node that errs once errs; one that errs twice is suspect.
_TWICE = 2
#: Samples by their index in the dataset, as the examination names them.
_INDICES = re.compile(r"dataset\[.*$")
#: How a note of the memory's watch begins.
_ALLOCATOR = "allocator retries"
#: The most characters of the reason why a save failed.
_REASON = 100


def next_time(story: RunStory) -> tuple[str, ...]:
    """What would have saved time or trouble; empty where there is nothing to say."""
    return tuple(dict.fromkeys(filter(None, _lessons(story))))


def _lessons(story: RunStory) -> Iterator[str]:
    launches = [launch for attempt in story.attempts for launch in attempt.launches]
    incidents = [incident for launch in launches for incident in launch.incidents]
    yield from _memory(story, incidents)
    yield from _data(story, launches)
    if not faults_on_purpose(story):
        yield from _nodes(launches)
    if sum(each.cause == Cause.LOSS_SPIKE.value for each in incidents) >= _TWICE:
        yield "try a lower learning rate or a longer warm-up: the loss jumped more than once"
    # More frequent saves help nothing where they fail, or where the next start can't use them.
    saved = [
        launch
        for launch, later in pairwise([*launches, None])
        if launch is not None and not launch.failed_saves and not _was_of_no_use(launch, later)
    ]
    if sum(each.repeated_s for each in saved) > max(
        _REPEATED_S, _REPEATED_SHARE * story.training_s
    ):
        repeated = plural(sum(each.repeated_steps or 0 for each in saved), "step")
        yield f"save more often (checkpoint.every_minutes): {repeated} had to be repeated"
    for launch in saved:
        if _came_too_late(launch):
            yield _more_time(launch)
    failed = [each for launch in launches for each in launch.failed_saves]
    if failed:
        count = plural(len(failed), "save")
        why = clean(first_line(failed[-1].event.reason), _REASON)
        yield f"{remedy(Cause.STORAGE)}: {count} failed ({why})"


def _was_of_no_use(launch: LaunchStory, later: LaunchStory | None) -> bool:
    """Whether the next launch resumed from before what this one had saved or begun at."""
    if later is None or not later.resumes:
        return False
    saved = [each.event.step for each in launch.checkpoints]
    begun = [each.event.step for each in launch.resumes]
    return later.resumes[0].event.step < max(saved + begun, default=0)


def _memory(story: RunStory, incidents: list[IncidentStory]) -> Iterator[str]:
    shrunk = _new_values(incidents, "micro_batch")
    if shrunk and _helped(story, incidents, "micro_batch"):
        often = "" if len(shrunk) == 1 else f" (memory ran out {len(shrunk)} times)"
        yield f"write micro_batch_size={clean(shrunk[-1], 20)} in the program{often}"
    raised = _new_values(incidents, "mem_factor")
    if raised and _helped(story, incidents, "mem_factor"):
        yield f"request {_memory_taken(story, raised[-1])}"
    longer = _new_values(incidents, "time_factor")
    if longer and _helped(story, incidents, "time_factor"):
        yield f"request {factor(longer[-1])} times the time limit from the start (resources.time)"
    fewer = _new_values(incidents, "worker_factor")
    if fewer and _helped(story, incidents, "worker_factor"):
        yield f"start with fewer data-loader workers (x{factor(fewer[-1])} helped) or more memory"
    notes = (note for attempt in story.attempts for note in attempt.notes)
    if not shrunk and any(note.startswith(_ALLOCATOR) for note in notes):
        yield (
            "try a smaller micro_batch_size: GPU memory was nearly full, and the allocator had to "
            "free cached blocks and retry, which costs time"
        )


def _memory_taken(story: RunStory, raised: str) -> str:
    """``resources.mem: 24G`` where it is known what was asked for."""
    size = memory_times(story.memory, raised)
    if size:
        return f"what it needed from the start: resources.mem: {size}"
    return f"{factor(raised)} times the memory from the start (resources.mem)"


def _data(story: RunStory, launches: Iterable[LaunchStory]) -> Iterator[str]:
    """Samples that are worth a look."""
    rows = [row for launch in launches for row in launch.skipped]
    evidence = [row.evidence for row in rows]
    evidence += [i.evidence for launch in launches for i in launch.incidents if i.repeats]
    indices = [match[0] for row in evidence for e in row if (match := _INDICES.search(e.text))]
    where = f", among them {clean(indices[0], 160)}" if indices else ""
    if any(change.parameter == "skipped_samples" for change in story.changes):
        yield f"look at the samples that were skipped{where}"
    elif indices:
        yield f"look at the samples of the bad steps: {clean(indices[0], 160)}"


def _nodes(launches: Iterable[LaunchStory]) -> Iterator[str]:
    """Nodes on which more than one step went wrong that was fine when computed again."""
    faults: Counter[str] = Counter()
    for launch in launches:
        nodes = {id(row): set(suspects(row.evidence)) for row in launch.skipped}
        for incident in launch.incidents:
            broken = incident.cause == Cause.GPU_ERROR.value
            if broken or incident.repeats is False:
                row = row_of(launch, incident)
                nodes.setdefault(id(incident if row is None else row), set()).update(incident.hosts)
        faults.update(host for hosts in nodes.values() for host in hosts)
    for host, times in sorted(faults.items()):
        if times >= _TWICE:
            name = clean(host, 64)
            yield (
                f"suspect node {name}: {times} faults there that did not reproduce; report it to "
                f"the cluster's support and exclude it (resources.exclude: {name})"
            )


def _helped(story: RunStory, incidents: list[IncidentStory], parameter: str) -> bool:
    """Whether training got past what the parameter was changed for, the newest of it included."""
    if story.status == RunStatus.FINISHED.value:
        return True
    changed = {each.cause for each in incidents if _new_values([each], parameter)}
    newest = {each.cause: each for each in incidents if each.cause in changed}
    return all(each.recovered for each in newest.values())


def _new_values(incidents: Iterable[IncidentStory], parameter: str) -> list[str]:
    changes = (c for i in incidents if i.decision is not None for c in i.decision.changes)
    return [change.new for change in changes if change.parameter == parameter]


def _came_too_late(launch: LaunchStory) -> bool:
    """The stop was agreed and the launch is over, but its checkpoint never came."""
    over = launch.ended is not None
    return over and launch.stop_step is not None and launch.stop_checkpoint is None


def _more_time(launch: LaunchStory) -> str:
    """What gives a final save more time, which depends on who ended the launch."""
    slowest = max((c.event.seconds for c in launch.checkpoints), default=None)
    took = "" if slowest is None else f" (saves take up to {span(slowest)})"
    causes = {each.cause for each in launch.incidents}
    if Cause.TIME_LIMIT.value in causes:
        return f"increase lead: a final save did not finish in time{took}"
    if Cause.PREEMPTED.value in causes:
        why = f"a final save did not finish within the grace period{took}"
        return f"save more often (checkpoint.every_minutes): {why}"
    return ""  # after a scancel or a crash no setting gives it more time
