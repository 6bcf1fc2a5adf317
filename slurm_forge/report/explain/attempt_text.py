"""The text of one attempt: its launches, and what happened in them in the order of time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import tzinfo

from slurm_forge.journal import events as ev
from slurm_forge.report import text as t
from slurm_forge.report.logs.files import where
from slurm_forge.report.story import story as s
from slurm_forge.report.story.consequences import (
    consequences,
    restart,
    saves,
    strike,
)
from slurm_forge.report.story.pace_story import (
    slow_line,
    trend_line,
)
from slurm_forge.report.story.plan_text import step_of
from slurm_forge.report.story.skipped_steps import row_of
from slurm_forge.report.story.unresolved_failure import is_fault
from slurm_forge.slurm.records import is_slurm_job
from slurm_forge.vocabulary.cause import Evidence
from slurm_forge.vocabulary.decision import Action

_GAP = "   "
#: Longer evidence is shortened, less where one attempt is shown than where all are.
_EVIDENCE = 220
_EVIDENCE_IN_FULL = 1200
#: Evidence that fits a line stays on it; else each piece has one of its own.
_ONE_LINE = 130
#: What was done about an incident is wrapped at this many characters.
_WIDTH = 110
#: Notes, rows of skipped steps and incidents of a launch that are shown by default.
_SHOWN_NOTES = 5
_SHOWN_ROWS = 5
_SHOWN_INCIDENTS = 8
_SHOWN_PACES = 5
#: Pieces of evidence that are shown by default: the strongest come first.
_SHOWN_EVIDENCE = 3
#: The words of ranks that only followed the first one: summarized.
_FOLLOWERS = "followers"
#: Where the stacks of a standstill lie: who reads of one wants them next.
_STACKS = "stacks"
_EXIT_CODE = "exit status"
_SHORT = 80
#: Why a save failed fits on its line.
_SAVE_REASON = 100
#: Words with a digit or a slash.
_DIFFERS = re.compile(r"\S*[\d/]\S*")
#: A rank that went without a word: the least of what is known where there is anything else.
_SILENT = re.compile(r"rank (\d{1,9}): on (\S+): gone")

#: When it was, and the lines about it.
_Moment = tuple[float, Sequence[str]]


class AttemptText:
    """Tells attempts of a run, briefly or in full; ``verbose`` shortens nothing."""

    def __init__(
        self,
        story: s.RunStory,
        now: float,
        zone: tzinfo | None,
        *,
        full: bool,
        verbose: bool = False,
    ) -> None:
        self._now = now
        self._zone = zone
        self._full = full
        self._limit = 0 if verbose else _EVIDENCE_IN_FULL if full else _EVIDENCE
        self._run = story
        self._incidents = {
            incident.id: incident
            for attempt in story.attempts
            for launch in attempt.launches
            for incident in launch.incidents
        }

    def attempt(self, one: s.AttemptStory, *, over: bool) -> Iterator[str]:
        """Its lines; ``over``: it does nothing any more."""
        yield _GAP.join(self._head(one))
        if one.code and (self._full or one.code != self._code_before(one)):
            yield f"  code: {t.clean(one.code, 120)}"
        for launch in one.launches:
            yield from self._launch(one, launch, over=over)
        if one.ended is None and over and one.found_out is None:
            yield f"  ended unexpectedly, last heard from at {self._at(one.last_seen)}"
        yield from self._failures(one)
        yield from (f"  {strike(each, one.last_seen, self._zone)}" for each in one.struck)
        yield from self._output(one, silent=one.ended is None and over)
        yield from self._held(one)
        # Each launch says what holds for all of them.
        known = tuple(dict.fromkeys(one.notes))
        notes = known if self._full else known[:_SHOWN_NOTES]
        yield from (f"  note: {t.clean(note, 400)}" for note in notes)
        if len(notes) < len(known):
            yield f"  and {t.plural(len(known) - len(notes), 'more note')}"

    def _code_before(self, one: s.AttemptStory) -> str:
        return next((e.code for e in reversed(self._run.attempts) if e.number < one.number), "")

    def _output(self, one: s.AttemptStory, *, silent: bool) -> Iterator[str]:
        """Where its output lies: errors first, where something went wrong."""
        faults = [i for launch in one.launches for i in launch.incidents if is_fault(i)]
        path = where(one.logs, faults[-1].rank if faults else None, errors=bool(faults) or silent)
        if path:
            yield f"  output: {t.clean(path, 400)}"

    def _held(self, one: s.AttemptStory) -> Iterator[str]:
        """In full: that it was put into the queue, held, and with which words."""
        if self._full and one.held is not None:
            done = "held" if one.held.confirmed else "asked Slurm to hold it"
            done = "could not be held" if one.held.refused else done
            job, why = t.clean(one.held.job, 40), t.clean(one.held.reason, 400)
            yield f"  {self._at(one.held.time)}  {done} in the queue as job {job}: {why}"

    def _head(self, one: s.AttemptStory) -> Iterator[str]:
        yield f"attempt {one.number}"
        if one.job:
            yield f"job {t.clean(one.job, 40)}"
        if one.nodes:
            yield t.some_nodes(one.nodes)
        end = one.last_seen if one.ended is None and one.found_out is not None else one.ended
        yield t.period(one.started, end, self._now, self._zone)
        if one.waited_s is not None and one.waited_s >= 1:
            queue = " in the queue" if is_slurm_job(one.job) else ""
            yield f"waited {t.span(one.waited_s)}{queue}"
        if self._full and one.via:
            yield f"via {t.clean(one.via, 40)}"

    def _launch(self, one: s.AttemptStory, launch: s.LaunchStory, *, over: bool) -> Iterator[str]:
        ranks = t.plural(launch.world_size, "rank") if launch.world_size else "ranks unknown"
        begun = restart(launch.resumes[0]) if launch.resumes else "no training yet"
        if launch.program is not None:
            ranks = "external program"
            begun = _of_program(launch)
        yield f"  launch {launch.number}{_GAP}{ranks}{_GAP}{begun}"
        moments = [
            *self._resumes(launch),
            *self._rejected(launch),
            *self._skips(launch),
            *self._failed_saves(launch),
            *self._late_probes(launch),
            *self._paces(launch),
            *self._incidents_of(one, launch),
        ]
        if self._full:
            moments += self._details(launch)
        for _, lines in sorted(moments, key=lambda moment: moment[0]):
            yield from (f"  {line}" for line in lines)
        if self._full and launch.probes:
            slowest = launch.slowest_probe_s
            took = "" if slowest is None else f", the slowest in {t.span(slowest)}"
            speed = launch.bandwidth
            fast = "" if speed is None else f", {speed / 1e9:.2g} GB/s over all ranks"
            # Not each is written down: those behind the last of them are missing.
            yield f"  at least {t.plural(launch.probes, 'probe')} passed{took}{fast}"
        if launch.probe_off:
            why = t.clean(launch.probe_off, self._limit)
            yield f"  the probe failed and training continued without it: {why}"
        yield from self._end(launch, over=over)

    def _resumes(self, launch: s.LaunchStory) -> Iterator[_Moment]:
        """Training that resumed inside the launch; unless in full, shown with the incident."""
        for resume in launch.resumes[1:]:
            if self._full or self._decision(resume.after) is None:
                event, name = resume.event, "the start"
                if event.checkpoint is not None:
                    name = f"step {t.number(event.step)} ({t.clean(event.checkpoint, 80)})"
                loaded = f", loaded in {t.span(event.load_s)}"
                yield resume.time, [f"{self._at(resume.time)}  resumed from {name}{loaded}"]

    def _rejected(self, launch: s.LaunchStory) -> Iterator[_Moment]:
        for rejected in launch.rejected:
            if self._full or not self._meant(launch, rejected):
                event = rejected.event
                name, why = t.clean(event.name, 80), t.clean(event.reason, self._limit)
                at = self._at(rejected.time)
                yield rejected.time, [f"{at}  did not resume from {name}: {why}"]

    def _meant(self, launch: s.LaunchStory, rejected: s.Timed[ev.CheckpointRejected]) -> bool:
        """Whether it was younger than what a rollback was to go back to."""
        after = next((r.after for r in launch.resumes if r.time >= rejected.time), None)
        decision = self._decision(after)
        if decision is None or decision.action != Action.ROLLBACK.value:
            return False
        step = step_of(rejected.event.name)
        return step is not None and step > (decision.target_step or 0)

    def _decision(self, incident_id: str | None) -> s.DecisionStory | None:
        incident = self._incidents.get(incident_id or "")
        return None if incident is None else incident.decision

    def _skips(self, launch: s.LaunchStory) -> Iterator[_Moment]:
        """Rows of skipped steps without an incident; the others are shown with theirs."""
        complete, in_part = _rows_of_incidents(launch)
        rows = [row for row in launch.skipped if self._full or id(row) not in complete]
        shown = rows if self._full else rows[:_SHOWN_ROWS]
        for row in shown:
            yield row.time, list(self._skip(row, with_evidence=id(row) not in in_part))
        hidden = rows[len(shown) :]
        if hidden:
            first = min(row.first_step for row in hidden)
            last = max(row.last_step for row in hidden)
            count = t.plural(sum(row.count for row in hidden), "more update")
            yield (
                hidden[0].time,
                [
                    f"{self._at(hidden[0].time)}  {count} skipped in "
                    f"{t.plural(len(hidden), 'row')}, between steps {t.number(first)} "
                    f"and {t.number(last)}"
                ],
            )

    def _skip(self, row: s.SkipStory, *, with_evidence: bool) -> Iterator[str]:
        """``with_evidence``: the evidence is shown here, not with the incident."""
        undone = "; undone by a rollback" if row.undone else ""
        evidence = _observations(row.evidence, self._limit) if with_evidence else []
        first, rest = "; ".join(evidence), []
        if len(first) > _ONE_LINE:
            first, *rest = evidence
        yield (
            f"{self._at(row.time)}  {t.plural(row.count, 'update')} skipped "
            f"({_steps(row.first_step, row.last_step)}, "
            f"samples {t.steps(row.first_sample, row.last_sample)}{undone})"
            f"{': ' if first else ''}{first}"
        )
        yield from (f"  {line}" for line in rest)

    def _incidents_of(self, one: s.AttemptStory, launch: s.LaunchStory) -> Iterator[_Moment]:
        """All of them, or the first and the last ones of very many."""
        incidents = launch.incidents
        hidden = range(0)
        if not self._full and len(incidents) > _SHOWN_INCIDENTS:
            hidden = range(_SHOWN_INCIDENTS // 2, len(incidents) - _SHOWN_INCIDENTS // 2)
            causes = ", ".join(dict.fromkeys(incidents[index].cause for index in hidden))
            time = incidents[hidden[0]].time
            yield (
                time,
                [f"{t.number(len(hidden))} more incidents from {self._at(time)} on: {causes}"],
            )
        for index, incident in enumerate(incidents):
            if index not in hidden:
                last = index == len(incidents) - 1
                yield incident.time, list(self._incident(one, launch, incident, last=last))

    def _incident(
        self, one: s.AttemptStory, launch: s.LaunchStory, incident: s.IncidentStory, *, last: bool
    ) -> Iterator[str]:
        evidence = incident.evidence
        if launch.program is not None:  # of a command the exit code says more than its last words
            evidence = tuple(sorted(evidence, key=lambda each: each.source != _EXIT_CODE))
        lines = self._evidence(evidence, one.number)
        sure = incident.confidence or "its evidence was lost"
        if incident.found_out is not None:
            sure += f"; discovered {t.moment(incident.found_out, self._now, self._zone)}"
        step = f"{_bad_steps(incident)}   " if incident.onset is not None else ""
        first, rest = "; ".join(lines) or "no evidence", []
        if len(first) > _ONE_LINE:
            first, *rest = lines
        yield f"{incident.cause:<16} {self._at(incident.time)}   {step}{first}   ({sure})"
        yield from (f"  {line}" for line in rest)
        where_ = _where(incident)
        if where_ and self._full:
            yield f"  {where_}"
        if self._full and incident.decision is not None:
            yield f"  decided: {t.clean(incident.decision.reason, 400)}"
        phrases = list(
            consequences(one, launch, incident, last=last, run=self._run, zone=self._zone)
        )
        yield from (f"  {line}" for line in _wrapped(phrases))

    def _evidence(self, evidence: Sequence[Evidence], attempt: int) -> list[str]:
        """All of it in full; else the strongest, and in a few words who only followed."""
        if self._full:
            lines = _observations(evidence, self._limit)
            if lines != _observations(evidence, 0):
                lines.append("(abridged: --verbose shows everything)")
            return lines
        followed = [each for each in evidence if each.source == _FOLLOWERS]
        silent = [each for each in evidence if _SILENT.fullmatch(f"{each.source}: {each.text}")]
        stacks = [each for each in evidence if each.source == _STACKS]
        own = [each for each in evidence if each not in (*followed, *silent, *stacks)]
        lines = _observations(own[:_SHOWN_EVIDENCE], self._limit)
        if len(own) > _SHOWN_EVIDENCE:
            more = t.plural(len(own) - _SHOWN_EVIDENCE, "more piece")
            lines.append(f"{more} with --attempt {attempt}")
        lines += [*_gone(silent), *_observations(stacks, 0)]
        lines += [_only_followed(each.text) for each in followed]
        return lines

    def _failed_saves(self, launch: s.LaunchStory) -> Iterator[_Moment]:
        for row in _in_a_row(launch):
            first, last = row[0], row[-1]
            why = t.clean(t.first_line(first.event.reason), _SAVE_REASON)
            what = f"save at step {t.number(first.event.step)}"
            if len(row) > 1:
                where = f"steps {t.number(first.event.step)} to {t.number(last.event.step)}"
                what = f"{t.plural(len(row), 'save')} in a row, at {where},"
            yield first.time, [f"{self._at(first.time)}  {what} failed: {why}"]

    def _late_probes(self, launch: s.LaunchStory) -> Iterator[_Moment]:
        for late in launch.late_probes:
            what = "values corrupted" if late.event.wrong else "late"
            yield late.time, [f"{self._at(late.time)}  probe failed, {what}: {_late(late.event)}"]

    def _paces(self, launch: s.LaunchStory) -> Iterator[_Moment]:
        """Slow nodes and general slowdowns; of many, the first ones."""
        shown = None if self._full else _SHOWN_PACES
        for slow in launch.slow[:shown]:
            yield slow.time, [f"{self._at(slow.time)}  {slow_line(slow, self._zone)}"]
        for trend in launch.trends[:shown]:
            yield trend.time, [f"{self._at(trend.time)}  {trend_line(trend, self._zone)}"]

    def _details(self, launch: s.LaunchStory) -> Iterator[_Moment]:
        """What is only shown in full."""
        for notice in launch.notices:
            what, source = t.clean(notice.event.what, 120), t.clean(notice.event.source, 120)
            yield notice.time, [f"{self._at(notice.time)}  notice: {what} ({source})"]
        if launch.stop_step is not None and launch.notices:
            agreed = launch.notices[0].time + (launch.agreed_s or 0.0)
            within = f"within {t.span(launch.agreed_s)}"
            step = t.number(launch.stop_step)
            line = f"{self._at(agreed)}  all ranks agreed to stop at step {step} {within}"
            yield agreed, [line]
        for saved in launch.checkpoints:
            name, why = t.clean(saved.event.name, 80), t.clean(saved.event.reason, 60)
            findings = t.clean("; ".join(saved.event.findings), self._limit)
            doubt = f"; suspect: {findings}" if findings else ""
            took = t.span(saved.event.seconds)
            yield (
                saved.time,
                [f"{self._at(saved.time)}  saved {name} in {took} ({why}){doubt}"],
            )

    def _end(self, launch: s.LaunchStory, *, over: bool) -> Iterator[str]:
        summary = saves(launch)
        if launch.outcome == "finished":
            step = "" if launch.step is None else f" at step {t.number(launch.step)}"
            yield f"  finished{step}{_GAP}{self._at(launch.ended)}{_GAP}{summary}".rstrip()
        elif launch.ended is None and not over:
            step = "" if launch.step is None else f"step {t.number(launch.step)}, "
            age = t.ago(launch.last_seen, self._now)
            yield f"  running{_GAP}{step}last heard from {age}{_GAP}{summary}".rstrip()
        elif not launch.incidents and (launch.outcome or summary):
            outcome = f"ended: {t.clean(launch.outcome, 60)}" if launch.outcome else ""
            yield f"  {outcome}{_GAP if outcome else ''}{summary}".rstrip()

    def _failures(self, one: s.AttemptStory) -> Iterator[str]:
        for comeback in one.comebacks:
            if comeback.outcome == "failed":
                why = t.clean(comeback.reason, self._limit)
                yield (f"  {self._at(comeback.time)}  {t.clean(comeback.method, 60)} failed: {why}")

    def _at(self, time: float | None) -> str:
        return t.clock(time, self._zone)


def _of_program(launch: s.LaunchStory) -> str:
    """Where a program resumed and how far it came, according to its output or files."""
    parts = []
    if launch.resumes:
        event = launch.resumes[0].event
        name = "" if event.checkpoint is None else f" ({t.clean(event.checkpoint, 80)})"
        parts.append(f"from step {t.number(event.step)}{name}" if event.step else "from the start")
    if launch.resumes and launch.step is not None:
        parts.append(f"reached step {t.number(launch.step)}")
    elif launch.program:
        parts.append(f"reached {t.clean(launch.program, 120)}")
    return ", ".join(parts) or "no progress seen"


def _rows_of_incidents(launch: s.LaunchStory) -> tuple[set[int], set[int]]:
    """By identity: rows that an incident covers whole, and all rows that have an incident."""
    complete, in_part = set[int](), set[int]()
    for incident in launch.incidents:
        row = row_of(launch, incident)
        if row is not None:
            in_part.add(id(row))
            if (row.first_step, row.last_step) == (incident.onset, incident.step):
                complete.add(id(row))
    return complete, in_part


def _in_a_row(launch: s.LaunchStory) -> Iterator[Sequence[s.Timed[ev.CheckpointFailed]]]:
    """Failed saves with no checkpoint between them, by what kind of failure it was."""
    row: list[s.Timed[ev.CheckpointFailed]] = []
    for failed in launch.failed_saves:
        apart = row and (
            any(row[-1].time < saved.time <= failed.time for saved in launch.checkpoints)
            or _kind(row[-1]) != _kind(failed)
        )
        if apart:
            yield row
            row = []
        row.append(failed)
    if row:
        yield row


def _kind(failed: s.Timed[ev.CheckpointFailed]) -> str:
    """The reason without what differs from save to save: steps, sizes, paths."""
    return _DIFFERS.sub("", t.first_line(failed.event.reason))


def _observations(evidence: Sequence[Evidence], limit: int) -> list[str]:
    return [t.observed(each.source, each.text, limit) for each in evidence]


def _only_followed(ranks: str) -> str:
    whose = "its" if ranks.startswith("rank ") else "their"
    return f"{t.clean(ranks, _SHORT)} only lost {whose} peer"


def _gone(silent: Sequence[Evidence]) -> list[str]:
    """``ranks 4, 5 on n06 gone``: by host, in a few words."""
    by_host: dict[str, list[str]] = {}
    for each in silent:
        match = _SILENT.fullmatch(f"{each.source}: {each.text}")
        if match is not None:
            by_host.setdefault(match[2], []).append(match[1])
    return [
        t.clean(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}", _SHORT)
        + f" on {t.clean(host, 64)} gone"
        for host, ranks in by_host.items()
    ]


def _wrapped(phrases: Sequence[str]) -> Iterator[str]:
    """As many of them on a line as fit."""
    line = ""
    for phrase in phrases:
        longer = f"{line} · {phrase}" if line else phrase
        if line and len(longer) > _WIDTH:
            yield line
            longer = phrase
        line = longer
    if line:
        yield line


def _bad_steps(incident: s.IncidentStory) -> str:
    if incident.onset is None or incident.step is None:
        return ""
    return _steps(incident.onset, incident.step)


def _steps(first: int, last: int) -> str:
    return f"{'step' if first == last else 'steps'} {t.steps(first, last)}"


def _where(incident: s.IncidentStory) -> str:
    parts = []
    if incident.step is not None:
        parts.append(f"step {t.number(incident.step)}")
    if incident.samples is not None:
        parts.append(f"samples {t.steps(incident.samples.first, incident.samples.stop - 1)}")
    if incident.rank is not None:
        parts.append(f"rank {t.number(incident.rank)}")
    if incident.hosts:
        parts.append(f"on {t.some_nodes(incident.hosts)}")
    return ", ".join(parts)


def _late(late: ev.ProbeMeasured) -> str:
    hosts = dict(zip(late.late_ranks, late.late_hosts, strict=False))
    names = (
        f"rank {rank}" + (f" ({t.clean(hosts[rank], 64)})" if rank in hosts else "")
        for rank in late.late_ranks
    )
    return ", ".join(names) or "no single rank"
