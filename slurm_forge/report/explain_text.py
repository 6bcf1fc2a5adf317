"""The text of ``explain``: a header, every attempt, and what it comes down to."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo

from slurm_forge.journal import RunStatus
from slurm_forge.report import story as s
from slurm_forge.report import text as t
from slurm_forge.report.consequences import consequences, restart, saves
from slurm_forge.report.logs import where
from slurm_forge.report.trouble import is_fault

__all__ = ["explain_text"]

_GAP = "   "
#: Longer evidence is cut where a whole run is told, not where one attempt is.
_EVIDENCE = 220
#: What is shorter than this, in time and as a share of all, is not worth a word in the header.
_WORTH_TELLING_S = 1.0
_WORTH_TELLING = 0.001
_SHOWN_ATTEMPTS = 5

#: Notes on an attempt that are shown without being asked for.
_SHOWN_NOTES = 5


def explain_text(
    story: s.RunStory,
    *,
    now: float,
    reference: str,
    zone: tzinfo | None = None,
    attempt: int | None = None,
) -> str:
    """The story as lines; ``attempt`` tells that one in full.  ``zone`` None is the local one."""
    lines = [_header(story)]
    if story.status != RunStatus.FINISHED.value:
        lines.append(_GAP + t.clean(story.words, 400))
    lines += [f"{_GAP}warning: {warning}" for warning in story.warnings]
    told = [a for a in story.attempts if attempt in (None, a.number)]
    if not told:
        lines += ["", "no attempt has been started yet" if attempt is None else "no such attempt"]
    teller = _Teller(now, zone, full=attempt is not None)
    last = story.attempts[-1].number if story.attempts else None
    for one in told:
        rests = story.status not in (RunStatus.RUNNING.value, RunStatus.SUBMITTED.value)
        lines += ["", *teller.attempt(one, over=one.number != last or rests)]
    lines += ["", *_closing(story, reference, attempt)]
    return "\n".join(lines) + "\n"


def _header(story: s.RunStory) -> str:
    parts = [t.clean(story.run, 80), story.status]
    if story.step is not None:
        of = "" if story.total_steps is None else f" of {t.number(story.total_steps)}"
        parts.append(f"step {t.number(story.step)}{of}")
    if story.attempts:
        launches = sum(len(attempt.launches) for attempt in story.attempts)
        parts.append(
            f"{t.plural(len(story.attempts), 'attempt')}, "
            f"{t.plural(launches, 'launch', 'launches')}"
        )
    if story.goodput is not None and story.elapsed_s is not None:
        parts.append(f"goodput {t.share(story.goodput)}")
        parts.append(f"{_spent(story, story.elapsed_s)}of {t.span(story.elapsed_s)}")
    return _GAP.join(parts)


def _spent(story: s.RunStory, elapsed: float) -> str:
    """Where the rest of the time went: what every run pays apart from what this one lost."""
    lost = elapsed - story.kept_s - story.startup_s - story.ending_s
    told = [
        f"{word} {t.span(seconds)}"
        for word, seconds in (
            ("start-up", story.startup_s),
            ("ending", story.ending_s),
            ("lost", lost),
        )
        if seconds >= max(_WORTH_TELLING_S, _WORTH_TELLING * elapsed)
    ]
    return f"{', '.join(told)} " if told else ""


def _closing(story: s.RunStory, reference: str, attempt: int | None) -> Iterator[str]:
    science = [t.clean(change.text, 400) for change in story.changes if change.science]
    beside = [t.clean(change.text, 400) for change in story.changes if not change.science]
    yield f"What was changed for your science: {'; '.join(science) or 'nothing'}."
    if beside:
        yield f"What was changed beside it: {'; '.join(beside)}."
    if story.next:
        yield f"Next: {'; '.join(t.clean(step, 400) for step in story.next)}."
    lessons = [t.clean(lesson, 400) for lesson in story.next_time]
    if lessons or not story.next:
        yield f"Next time: {'; '.join(lessons) or 'nothing to do'}."
    if attempt is None:
        yield from _details(story, reference)


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


class _Teller:
    """Tells attempts and launches, briefly or in full."""

    def __init__(self, now: float, zone: tzinfo | None, *, full: bool) -> None:
        self._now = now
        self._zone = zone
        self._full = full

    def attempt(self, one: s.AttemptStory, *, over: bool) -> Iterator[str]:
        yield _GAP.join(self._head(one))
        for launch in one.launches:
            yield from self._launch(one, launch, over=over)
        if one.ended is None and over:
            yield f"  ended without a word, last heard of {self._at(one.last_seen)}"
        yield from self._failures(one)
        yield from self._output(one, silent=one.ended is None and over)
        notes = one.notes if self._full else one.notes[:_SHOWN_NOTES]
        yield from (f"  note: {t.clean(note, 400)}" for note in notes)
        if len(notes) < len(one.notes):
            yield f"  and {t.plural(len(one.notes) - len(notes), 'more note')}"

    def _output(self, one: s.AttemptStory, *, silent: bool) -> Iterator[str]:
        """Where its output lies: needed where something went wrong, and asked for in full."""
        faults = [i for launch in one.launches for i in launch.incidents if is_fault(i)]
        if not (faults or silent or self._full):
            return
        found = where(one.logs, faults[-1].rank if faults else None)
        if found:
            yield f"  output: {t.clean(found, 400)}"

    def _head(self, one: s.AttemptStory) -> Iterator[str]:
        yield f"attempt {one.number}"
        if one.job:
            yield f"job {t.clean(one.job, 40)}"
        if one.nodes:
            yield t.nodes(one.nodes)
        yield t.period(one.started, one.ended, self._now, self._zone)
        if one.waited_s is not None and one.waited_s >= 1:
            queue = " in the queue" if one.job[:1].isdigit() else ""
            yield f"waited {t.span(one.waited_s)}{queue}"
        if self._full and one.via:
            yield f"via {t.clean(one.via, 40)}"

    def _launch(self, one: s.AttemptStory, launch: s.LaunchStory, *, over: bool) -> Iterator[str]:
        yield from (f"  {line}" for line in self._start(launch))
        for rejected in launch.rejected:
            name, why = t.clean(rejected.name, 80), t.clean(rejected.reason, self._limit)
            yield f"  passed over checkpoint {name}: {why}"
        for skip in launch.skipped:
            yield (
                f"  skipped step {t.steps(skip.first_step, skip.last_step)}, samples "
                f"{t.steps(skip.first_sample, skip.last_sample)}: the update was not applied"
                f"{'; undone by going back' if skip.undone else ''}"
            )
        for time, line in sorted(self._moments(launch), key=lambda pair: pair[0]):
            yield f"  {self._at(time)}  {line}"
        if self._full and launch.probes:
            slowest = launch.slowest_probe_s
            took = "" if slowest is None else f", the slowest in {t.span(slowest)}"
            yield f"  {t.plural(launch.probes, 'probe')} fine{took}"
        for index, incident in enumerate(launch.incidents):
            yield from self._incident(
                one, launch, incident, last=index == len(launch.incidents) - 1
            )
        yield from self._end(launch, over=over)

    def _start(self, launch: s.LaunchStory) -> Iterator[str]:
        ranks = t.plural(launch.world_size, "rank") if launch.world_size else "ranks unknown"
        head = f"launch {launch.number}{_GAP}{ranks}"
        if not launch.resumes:
            yield f"{head}{_GAP}no training yet"
        for resume in launch.resumes:
            yield f"{head}{_GAP}{restart(resume)}"
            head = f"launch {launch.number}{_GAP}again"

    def _incident(
        self, one: s.AttemptStory, launch: s.LaunchStory, incident: s.IncidentStory, *, last: bool
    ) -> Iterator[str]:
        seen = "; ".join(_observation(e, self._limit) for e in incident.evidence)
        sure = incident.confidence or "its evidence was lost"
        yield (
            f"  {incident.cause:<16} {self._at(incident.time)}   {seen or 'no evidence'}   ({sure})"
        )
        where = _where(incident)
        if where and self._full:
            yield f"    {where}"
        told = list(consequences(one, launch, incident, last=last))
        if told:
            yield "    " + " · ".join(told)
        if self._full and incident.decision is not None:
            yield f"    decided: {t.clean(incident.decision.reason, 400)}"

    def _moments(self, launch: s.LaunchStory) -> Iterator[tuple[float, str]]:
        """What has a time of its own, in no order; told in full, everything."""
        for failed in launch.failed_saves:
            why = t.clean(failed.reason, self._limit)
            yield failed.time, f"save at step {t.number(failed.step)} failed: {why}"
        for late in launch.late_probes:
            yield late.time, f"probe failed, late: {_late(late)}"
        if not self._full:
            return
        for notice in launch.notices:
            what, source = t.clean(notice.what, 120), t.clean(notice.source, 120)
            yield notice.time, f"notice: {what} ({source})"
        if launch.stop_step is not None and launch.notices:
            agreed = launch.notices[0].time + (launch.agreed_s or 0.0)
            within = f"within {t.span(launch.agreed_s)}"
            yield agreed, f"all ranks agreed to stop at step {t.number(launch.stop_step)} {within}"
        for saved in launch.checkpoints:
            name, why = t.clean(saved.name, 80), t.clean(saved.reason, 60)
            found = t.clean("; ".join(saved.findings), self._limit)
            doubt = f"; suspect: {found}" if found else ""
            yield saved.time, f"saved {name} in {t.span(saved.save_s)} ({why}){doubt}"

    def _end(self, launch: s.LaunchStory, *, over: bool) -> Iterator[str]:
        summary = saves(launch)
        if launch.outcome == "finished":
            step = "" if launch.step is None else f" at step {t.number(launch.step)}"
            yield f"  finished{step}{_GAP}{self._at(launch.ended)}{_GAP}{summary}".rstrip()
        elif launch.ended is None and not over:
            step = "" if launch.step is None else f"step {t.number(launch.step)}, "
            heard = t.ago(launch.last_seen, self._now)
            yield f"  running{_GAP}{step}last heard of {heard}{_GAP}{summary}".rstrip()
        elif not launch.incidents and (launch.outcome or summary):
            outcome = f"ended: {t.clean(launch.outcome, 60)}" if launch.outcome else ""
            yield f"  {outcome}{_GAP if outcome else ''}{summary}".rstrip()

    def _failures(self, one: s.AttemptStory) -> Iterator[str]:
        for comeback in one.comebacks:
            if comeback.outcome == "failed":
                why = t.clean(comeback.reason, self._limit)
                yield (
                    f"  {self._at(comeback.time)}  "
                    f"{t.clean(comeback.method, 60)} was not taken: {why}"
                )

    @property
    def _limit(self) -> int:
        return 0 if self._full else _EVIDENCE

    def _at(self, time: float | None) -> str:
        return t.clock(time, self._zone)


def _observation(seen: s.Observation, limit: int) -> str:
    return f"{t.clean(seen.source, 60)}: {t.clean(seen.text, limit)}"


def _where(incident: s.IncidentStory) -> str:
    parts = []
    if incident.step is not None:
        parts.append(f"step {t.number(incident.step)}")
    if incident.rank is not None:
        parts.append(f"rank {t.number(incident.rank)}")
    if incident.hosts:
        parts.append(f"on {t.nodes(incident.hosts)}")
    return ", ".join(parts)


def _late(late: s.LateProbe) -> str:
    hosts = dict(zip(late.ranks, late.hosts, strict=False))
    named = (
        f"rank {rank}" + (f" ({t.clean(hosts[rank], 64)})" if rank in hosts else "")
        for rank in late.ranks
    )
    return ", ".join(named) or "nobody in particular"
