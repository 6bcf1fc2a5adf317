"""The text of ``explain``: a header, every attempt, and a conclusion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import tzinfo

from slurm_forge.journal import RunState, RunStatus
from slurm_forge.journal.state import AttemptState
from slurm_forge.report import text as t
from slurm_forge.report.explain.attempt_text import AttemptText
from slurm_forge.report.status.status_text import failing_saves_text
from slurm_forge.report.story import story as s
from slurm_forge.report.story.diagnosis import diagnosis
from slurm_forge.report.story.unresolved_failure import is_fault
from slurm_forge.slurm.records import is_slurm_job

_GAP = "   "
#: What is shorter than this, in time and as a share of all, is not worth a word.
_WORTH_TELLING_S = 1.0
_WORTH_TELLING = 0.001
_SHOWN_ATTEMPTS = 5
_ONE_LINE = 130


def explain_text(
    story: s.RunStory,
    *,
    now: float,
    reference: str,
    zone: tzinfo | None = None,
    attempt: int | None = None,
    verbose: bool = False,
    earlier: RunState | None = None,
) -> str:
    """The story as lines.

    Args:
        story: The run.
        now: The time.
        reference: What a person types to name the run.
        zone: The time zone; None is the local one.
        attempt: Show only this one, in full.
        verbose: Shorten no evidence.
        earlier: The state after attempts that the story does not contain: they are summarized, and
            costs and changes are marked as those of the others.
    """
    left_out = () if earlier is None else earlier.attempts
    since = f" since attempt {story.attempts[0].number}" if left_out and story.attempts else ""
    lines = [_header(story, left_out, since)]
    if story.status != RunStatus.FINISHED.value:
        lines.append(_GAP + t.clean(story.words, 400))
    if len(story.jobs) > 1:
        lines.append(_GAP + t.chain(story.jobs))
    if story.failing_saves is not None:
        lines.append(f"{_GAP}saves: {failing_saves_text(story.failing_saves, zone)}")
    lines += [f"{_GAP}warning: {warning}" for warning in story.warnings]
    attempts = [a for a in story.attempts if attempt in (None, a.number)]
    if not attempts:
        lines += ["", "no attempt has been started yet" if attempt is None else "no such attempt"]
    if earlier is not None and left_out:
        lines += ["", *_earlier(earlier, now, reference, zone)]
    text = AttemptText(story, now, zone, full=attempt is not None, verbose=verbose)
    last = story.attempts[-1].number if story.attempts else None
    for one in attempts:
        rests = story.status not in (RunStatus.RUNNING.value, RunStatus.SUBMITTED.value)
        lines += ["", *text.attempt(one, over=one.number != last or rests)]
    lines += ["", *_closing(story, reference, attempt, since)]
    return "\n".join(lines) + "\n"


def _earlier(state: RunState, now: float, reference: str, zone: tzinfo | None) -> Iterator[str]:
    """How many attempts are omitted, what ended them, and the command that shows them."""
    first, last = state.attempts[0], state.attempts[-1]
    end = last.started if last.ended is None else last.ended
    parts = [f"attempts {first.number} to {last.number}", t.period(first.started, end, now, zone)]
    if state.committed_step is not None:
        parts.append(f"up to step {t.number(state.committed_step)}")
    yield _GAP.join(parts)
    causes = Counter(each.cause.value for a in state.attempts for _, each in a.incidents)
    if causes:
        counted = (f"{cause} {t.number(count)}" for cause, count in causes.most_common())
        yield f"  {t.plural(causes.total(), 'incident')}: {', '.join(counted)}"
    skipped = sum(len(each.skipped) for each in state.attempts)
    decided = sum(bool(each.changes) for a in state.attempts for _, each in a.decisions)
    changes = [
        *([f"{t.plural(skipped, 'step')} skipped"] if skipped else []),
        *([f"{t.plural(decided, 'decision')} with changes"] if decided else []),
        *([f"the job changed {t.plural(state.revision, 'time')}"] if state.revision else []),
    ]
    if changes:
        yield f"  {', '.join(changes)}"
    yield f"  all of it: slurm-forge explain {t.clean(reference, 300)} --all   (or --attempt N)"


def _header(story: s.RunStory, left_out: Sequence[AttemptState], since: str) -> str:
    parts = [t.clean(story.run, 80), story.status]
    if story.step is not None:
        of = "" if story.total_steps is None else f" of {t.number(story.total_steps)}"
        parts.append(f"step {t.number(story.step)}{of}")
    if story.attempts:
        count = len(left_out) + len(story.attempts)
        launches = sum(len(attempt.launches) for attempt in left_out)
        launches += sum(len(attempt.launches) for attempt in story.attempts)
        parts.append(f"{t.plural(count, 'attempt')}, {t.plural(launches, 'launch', 'launches')}")
    if story.goodput is not None and story.elapsed_s is not None:
        parts.append(f"{since.lstrip()} goodput {t.share(story.goodput)}".lstrip())
        parts.append(f"{_spent(story, story.elapsed_s)}of {t.span(story.elapsed_s)}")
    return _GAP.join(parts)


def _spent(story: s.RunStory, elapsed: float) -> str:
    """Where the rest of the time went: what every run pays apart from what this one lost."""
    elsewhere = story.startup_s + story.ending_s + story.queued_s + story.rest_s
    lost = elapsed - story.kept_s - elsewhere
    parts = [
        f"{word} {t.span(seconds)}"
        for word, seconds in (
            ("start-up", story.startup_s),
            ("waiting", story.queued_s),
            ("stopped", story.rest_s),
            ("shutdown", story.ending_s),
            ("lost", lost),
        )
        if seconds >= _worth_telling_s(story)
    ]
    return f"{', '.join(parts)} " if parts else ""


def _worth_telling_s(story: s.RunStory) -> float:
    return max(_WORTH_TELLING_S, _WORTH_TELLING * (story.elapsed_s or 0.0))


def costs(story: s.RunStory) -> Iterator[str]:
    """Node time that was lost, and how long the run waited for nodes."""
    ranks = max((each.ranks or 1 for each in _incidents(story)), default=1)
    worth = _worth_telling_s(story) * ranks
    if story.lost_rank_s >= worth:
        why = []
        if story.repeated_steps:
            least = "at least " if story.repeated_at_least else ""
            why.append(f"{least}{t.plural(story.repeated_steps, 'step')} repeated")
        if story.starts:
            why.append(t.plural(story.starts, "restart"))
        because = f" ({', '.join(why)})" if why else ""
        yield f"{t.rank_time(story.lost_rank_s, story.gpus_per_rank)} lost{because}"
    if story.idle_rank_s >= worth:
        yield f"{t.rank_time(story.idle_rank_s, story.gpus_per_rank)} idle"
    where = " in the queue" if is_slurm_job(story.job) else ""
    if story.queued_s >= _worth_telling_s(story):
        yield f"{t.span(story.queued_s)} waiting{where}"
    # The header's time counts from the first start on.
    first = story.waited_s - story.queued_s
    if first >= _WORTH_TELLING_S:
        yield f"{t.span(first)} waiting{where} before the first start"


def _incidents(story: s.RunStory) -> Iterator[s.IncidentStory]:
    for attempt in story.attempts:
        for launch in attempt.launches:
            yield from launch.incidents


def _closing(story: s.RunStory, reference: str, attempt: int | None, since: str) -> Iterator[str]:
    cost = list(costs(story))
    if cost:
        yield from _listed(f"What it cost{since}", [", ".join(cost)])
    science = [t.clean(change.text, 400) for change in story.changes if change.science]
    beside = [t.clean(change.text, 400) for change in story.changes if not change.science]
    changed = [*science, "nothing else"] if science else ["none"]
    yield from _listed(f"Changes that affect your results{since}", changed)
    if beside:
        yield from _listed("Other changes", beside)
    common = diagnosis(story)
    if common is not None and attempt is None:
        yield f"Diagnosis: {t.clean(common.cause, 40)} ({common.agreeing}): {common.text}."
    if story.next:
        yield from _listed("Next", [t.clean(step) for step in story.next])
    lessons = [t.clean(lesson, 400) for lesson in story.next_time]
    if lessons or not story.next:
        yield from _listed("Next time", lessons or ["no action needed"])
    if attempt is None:
        yield from _details(story, reference)


def _listed(label: str, items: Sequence[str]) -> Iterator[str]:
    """On one line where it is short enough to be read at a glance, else one below the other."""
    line = f"{label}: {'; '.join(items)}."
    if len(items) == 1 or len(line) <= _ONE_LINE:
        yield line
        return
    yield f"{label}:"
    yield from (f"  {one}" for one in items)


def _details(story: s.RunStory, reference: str) -> Iterator[str]:
    """The newest attempt in which something went wrong, else in which anything happened."""
    eventful = [a.number for a in story.attempts if any(launch.incidents for launch in a.launches)]
    if not eventful:
        return
    faulty = [
        a.number
        for a in story.attempts
        if any(is_fault(incident) for launch in a.launches for incident in launch.incidents)
    ]
    chosen = (faulty or eventful)[-1]
    others = [str(number) for number in eventful if number != chosen][-_SHOWN_ATTEMPTS:]
    beside = f"   (or {', '.join(others)})" if others else ""
    yield f"Details: slurm-forge explain {t.clean(reference, 300)} --attempt {chosen}{beside}"
