"""The first screen of the page of a run: what happened, what it cost, what to do next."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta, tzinfo

from slurm_forge.journal import RunStatus
from slurm_forge.report import text as t
from slurm_forge.report.explain.explain_text import costs
from slurm_forge.report.page.values import KeyFigure, Words
from slurm_forge.report.page.waterfall import Waterfall
from slurm_forge.report.story import story as s
from slurm_forge.report.story.consequences import consequences, in_the_queue
from slurm_forge.report.story.diagnosis import diagnosis, faults_on_purpose, suspected_nodes
from slurm_forge.report.story.time_spans import saved_step
from slurm_forge.report.story.unresolved_failure import is_fault
from slurm_forge.slurm.records import is_slurm_job
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action

#: What somebody types, inside of a sentence.
_COMMAND = re.compile(r"((?:slurm-forge|scontrol|scancel|squeue) [^;,()]*[^;,() .])")
#: The two commands that release a held run.
_EITHER = re.compile(r"scontrol release \S+, or (?P<ours>slurm-forge requeue \S+)")
_NOUNS = {
    Cause.PREEMPTED: ("preemption", "preemptions"),
    Cause.TIME_LIMIT: ("end at the time limit", "ends at the time limit"),
    Cause.NODE_FAIL: ("node failure", "node failures"),
    Cause.CUDA_OOM: ("out-of-memory error on a GPU", "out-of-memory errors on a GPU"),
    Cause.HOST_OOM: ("out-of-memory kill on a node", "out-of-memory kills on a node"),
    Cause.NON_FINITE: (
        "stretch of NaN or infinite gradients",
        "stretches of NaN or infinite gradients",
    ),
    Cause.LOSS_SPIKE: ("loss spike", "loss spikes"),
    Cause.NCCL_ERROR: ("NCCL error", "NCCL errors"),
    Cause.HANG: ("hang", "hangs"),
    Cause.STRAGGLER: ("straggler", "stragglers"),
    Cause.GPU_ERROR: ("GPU error", "GPU errors"),
    Cause.STORAGE: ("storage failure", "storage failures"),
    Cause.USER_CANCELLED: ("cancellation by a user", "cancellations by a user"),
    Cause.ADMIN_REQUEUE: ("requeue by an administrator", "requeues by an administrator"),
    Cause.STOP_REQUESTED: ("requested stop", "requested stops"),
    Cause.CRASH: ("crash", "crashes"),
    Cause.APP_ERROR: ("exception in the program", "exceptions in the program"),
    Cause.ENV_MISMATCH: ("environment mismatch", "environment mismatches"),
    Cause.CHECKPOINT_BAD: ("damaged checkpoint", "damaged checkpoints"),
    Cause.RANK_MISMATCH: ("difference between ranks", "differences between ranks"),
    Cause.EXTERNAL_SERVICE: ("failure of an external service", "failures of external services"),
    Cause.UNKNOWN: ("unexplained end", "unexplained ends"),
}
_BY_VALUE = {cause.value: nouns for cause, nouns in _NOUNS.items()}
_TONES = {
    RunStatus.FINISHED: "good",
    RunStatus.RUNNING: "live",
    RunStatus.HELD: "bad",
    RunStatus.STOPPED: "warn",
    RunStatus.CANCELLED: "warn",
}
_LONG = 600
#: How those costs end that are node time.
_IN_VAIN = (" lost", " idle")
#: What the supervisor saw of a signal, and no more.
_UNSENT = re.compile(r"(SIG[A-Z0-9]+), of unknown origin")
#: When Slurm decided on a preemption, and when it would end the job.
_PREEMPTED = re.compile(
    r"\bPreemptTime=(?P<begin>\d\d:\d\d:\d\d)(?: EndTime=(?P<end>\d\d:\d\d:\d\d))?"
)
#: Readers of the first screen may not know the unit of node time.
_RANK = " (A rank is one training process.)"
_BAD = " had NaN or infinite gradients"
#: Of shorter runs the seconds matter.
_SHORT_S = 7200.0
#: Sources that say nothing to a reader who does not know our parts.
_OURS = ("watchdog: ", "signals: ")
#: The beginning of the phrase that says why a run is held.
_HELD = "held: "
_SHOWN_CAUSES = 4


def tone_of(status: str) -> str:
    """``good``, ``live``, ``bad``, ``warn``, or ``calm`` for a run that waits."""
    return next((tone for each, tone in _TONES.items() if each.value == status), "calm")


def with_commands(sentence: str) -> tuple[Words, ...]:
    """A sentence in pieces, so that commands to type can be set apart from prose."""
    text = t.clean(sentence, _LONG)
    pieces = _COMMAND.split(text if _COMMAND.match(text) else text[:1].upper() + text[1:])
    return tuple(Words(text, command=bool(at % 2)) for at, text in enumerate(pieces) if text)


def next_steps(story: s.RunStory) -> tuple[tuple[Words, ...], ...]:
    """What the reader does now; of two equivalent commands ours, with its effect."""
    if story.next:
        onward = ""
        if story.committed_step is not None:
            onward = f" (it continues from step {t.number(story.committed_step)})"
        steps = (_EITHER.sub(rf"\g<ours>{onward}", each) for each in story.next)
        return tuple(with_commands(each) for each in steps)
    hint = node_hint(story)
    done = "nothing to do: the run is finished"
    return (with_commands(f"{done}; {hint}" if hint else done),)


def node_hint(story: s.RunStory) -> str:
    """What to do about nodes that a replayed step made suspect; empty if there are none."""
    suspected = suspected_nodes(story)
    nodes = list(dict.fromkeys(each.node for each in suspected))
    if not nodes:
        return ""
    names = t.some_nodes(t.clean(node, 64) for node in nodes)
    at = ", ".join(t.number(step) for step in list(dict.fromkeys(e.step for e in suspected))[:3])
    if faults_on_purpose(story):
        return f"{names} came under suspicion (step {at}), but faults were injected on purpose"
    return (
        f"before the next run check {names}, where step {at} went wrong and was fine when computed "
        "again: slurm-forge probe"
    )


def common_cause(story: s.RunStory) -> str:
    """``All 6 hangs: rank 1 at step 220, …``; empty if the incidents have nothing in common."""
    found = diagnosis(story)
    if found is None:
        return ""
    nouns = _BY_VALUE.get(found.cause, (found.cause, found.cause))[1]
    return f"{found.agreeing[:1].upper()}{found.agreeing[1:]} {nouns}: {found.text}"


def interruptions(story: s.RunStory) -> str:
    """``2 preemptions, 1 hang``; empty if nothing happened."""
    return ", ".join(_by_cause(story))


def _by_cause(story: s.RunStory) -> list[str]:
    counted = Counter(_nouns(incident) for _, _, incident in incidents_of(story))
    named = [t.plural(count, *nouns) for nouns, count in counted.most_common()]
    others = sum(count for _, count in counted.most_common()[_SHOWN_CAUSES:])
    return named[:_SHOWN_CAUSES] + ([t.plural(others, "other incident")] if others else [])


def _nouns(incident: s.IncidentStory) -> tuple[str, str]:
    """Singular and plural; a cause unknown to this version is named as it is."""
    if _sender_unknown(incident):
        return "stop by a signal", "stops by a signal"
    cause = t.clean(incident.cause, 40)
    return _BY_VALUE.get(incident.cause, (cause, cause))


def label(incident: s.IncidentStory) -> str:
    """The cause in a word; ``stopped`` for a signal of unknown origin."""
    return "stopped" if _sender_unknown(incident) else t.clean(incident.cause, 40)


def _sender_unknown(incident: s.IncidentStory) -> bool:
    first = incident.evidence[0].text if incident.evidence else ""
    return incident.cause == Cause.PREEMPTED.value and _UNSENT.fullmatch(first) is not None


def moment(time: float, story: s.RunStory, now: float, zone: tzinfo | None) -> str:
    """A day and a time, with seconds if the run was short."""
    shown = t.moment(time, now, zone)
    if story.elapsed_s is None or story.elapsed_s > _SHORT_S:
        return shown
    clock = t.clock(time, zone)
    return f"{shown.removesuffix(clock[:5])}{clock}" if shown.endswith(clock[:5]) else shown


def incidents_of(
    story: s.RunStory,
) -> Iterator[tuple[s.AttemptStory, s.LaunchStory, s.IncidentStory]]:
    """Every incident with where it happened, in the order of the story."""
    for attempt in story.attempts:
        for launch in attempt.launches:
            yield from ((attempt, launch, incident) for incident in launch.incidents)


def paragraph(story: s.RunStory, zone: tzinfo | None) -> tuple[str, ...]:
    """The story in a few sentences."""
    return tuple(filter(None, _sentences(story, zone)))


def _sentences(story: s.RunStory, zone: tzinfo | None) -> Iterator[str]:
    yield _standing(story)
    told = _telling(story)
    if told is None or _several(story):
        yield _course(story)
    if told is not None:
        yield _incident(*told, story, zone)
    cost = ", ".join(costs(story))
    if cost:
        yield f"What it cost: {cost}.{_RANK if ' rank-' in f' {cost}' else ''}"
    elif story.attempts:
        yield "No work was lost."
    science = [t.clean(change.text, 200) for change in story.changes if change.science]
    if science:
        count = t.plural(len(science), "change that affects", "changes that affect")
        more = f"; and {t.number(len(science) - 1)} more" if len(science) > 1 else ""
        yield f"{count} your results: {science[0]}{more}."
    elif story.attempts:
        yield "Nothing that affects your results was changed."


def _standing(story: s.RunStory) -> str:
    name = t.clean(story.run, 80)
    steps = step_text(story)
    at = f" at {steps}" if steps else ""
    since = ""
    if story.elapsed_s:
        since = f", {t.span(story.elapsed_s)} after its first start"
    if story.status == RunStatus.FINISHED.value:
        return f"{name} finished{at}{since}."
    if not story.attempts:
        return f"{name} has not started yet: {t.clean(story.words, 300)}."
    words = t.clean(story.words, 300).removeprefix(f"{story.status}: ").rstrip(".")
    cause, colon, why = words.partition(": ")
    if colon and cause in _BY_VALUE:
        return f"{name} is {story.status}{at}{since}. Why: {why}."
    return f"{name} is {story.status}{at}{since}: {words}."


def step_text(story: s.RunStory) -> str:
    """``step 130 of 400``; empty before any training."""
    if story.step is None:
        return ""
    of = "" if story.total_steps is None else f" of {t.number(story.total_steps)}"
    saved = saved_step(story)
    if saved is None:
        return f"step {t.number(story.step)}{of}"
    return f"step {t.number(story.step)}{of} (saved to step {t.number(saved)})"


def _course(story: s.RunStory) -> str:
    if not story.attempts:
        return ""
    attempts = t.plural(len(story.attempts), "attempt")
    happened = _by_cause(story)
    if not happened:
        so_far = "" if story.status == RunStatus.FINISHED.value else " so far"
        return f"{attempts}{so_far}, without any incident."
    *others, last = happened
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"In {attempts} there were {listed}."


def _several(story: s.RunStory) -> bool:
    return sum(1 for _ in incidents_of(story)) > 1


def _telling(
    story: s.RunStory,
) -> tuple[s.AttemptStory, s.LaunchStory, s.IncidentStory] | None:
    """The incident to report: the one that halted the run, else the costliest fault."""
    found = list(incidents_of(story))
    if not found:
        return None
    if story.status in (RunStatus.HELD.value, RunStatus.STOPPED.value, RunStatus.CANCELLED.value):
        return found[-1]
    faults = [each for each in found if is_fault(each[2])] or found
    return max(faults, key=lambda each: each[2].lost_rank_s + each[2].idle_rank_s)


def _incident(
    attempt: s.AttemptStory,
    launch: s.LaunchStory,
    incident: s.IncidentStory,
    story: s.RunStory,
    zone: tzinfo | None,
) -> str:
    noun = _nouns(incident)[0]
    seen = headline(incident, 160)
    after = "; ".join(followed(attempt, launch, incident, story, zone))
    then = f" What followed: {after}." if after else ""
    if not _several(story):
        attempts = t.plural(len(story.attempts), "attempt")
        return f"In {attempts} there was 1 {noun}: {seen.removesuffix(_BAD)}.{then}"
    of_its_kind = sum(each.cause == incident.cause for _, _, each in incidents_of(story))
    newest = incident is list(incidents_of(story))[-1][2]
    which = "The" if of_its_kind == 1 else "The last" if newest else "The costliest"
    return f"{which} {noun}: {seen}.{then}"


def followed(
    attempt: s.AttemptStory,
    launch: s.LaunchStory,
    incident: s.IncidentStory,
    story: s.RunStory,
    zone: tzinfo | None,
) -> tuple[str, ...]:
    """What followed from an incident, and its cost.

    Why a run is held, and where it waits, belongs to the state of the run and is omitted here.
    """
    last = incident is launch.incidents[-1]
    told: tuple[str, ...] = (_HELD,)
    if attempt.held is not None and attempt.held.confirmed and holds_now(incident, story):
        told = (_HELD, in_the_queue(attempt.held))
    phrases = consequences(attempt, launch, incident, last=last, run=story, zone=zone)
    return tuple(phrase for phrase in phrases if not phrase.startswith(told))


def holds_now(incident: s.IncidentStory, story: s.RunStory) -> bool:
    """Whether it is the reason why the run is held now."""
    if story.status != RunStatus.HELD.value or incident.decision is None:
        return False
    newest = [each for _, _, each in incidents_of(story)][-1:]
    return newest == [incident] and incident.decision.action == Action.HOLD.value


def headline(incident: s.IncidentStory, limit: int) -> str:
    """The strongest piece of evidence."""
    if not incident.evidence:
        return "no evidence"
    first = incident.evidence[0]
    signal = _UNSENT.fullmatch(first.text)
    if signal is not None:
        return f"stopped by {signal[1]} (sender unknown)"
    if incident.cause == Cause.PREEMPTED.value:
        records = (_PREEMPTED.search(each.text) for each in incident.evidence)
        record = next((each for each in records if each is not None), None)
        if record is not None:
            return f"Slurm took the nodes back, {_notice(record)}"
    onset, step = incident.onset, incident.step
    if incident.cause == Cause.NON_FINITE.value and None not in (onset, step) and onset != step:
        count = (step or 0) - (onset or 0) + 1
        where = t.steps(onset or 0, step or 0)
        return f"{t.number(count)} consecutive steps ({where}){_BAD}"
    seen = t.observed(first.source, first.text, limit)
    ours = next((each for each in _OURS if seen.startswith(each)), "")
    return seen.removeprefix(ours)


def _notice(record: re.Match[str]) -> str:
    if record["end"] is None:
        return "length of the notice unknown"
    begin, end = (
        timedelta(hours=int(text[:2]), minutes=int(text[3:5]), seconds=int(text[6:]))
        for text in (record["begin"], record["end"])
    )
    seconds = ((end - begin) % timedelta(days=1)).total_seconds()
    return f"with {t.span(seconds)} of notice" if seconds else "without notice"


def key_figures(story: s.RunStory, spent: Waterfall) -> tuple[KeyFigure, ...]:
    """The numbers that a reader wants first."""
    return tuple(_key_figures(story, spent))


def _key_figures(story: s.RunStory, spent: Waterfall) -> Iterator[KeyFigure]:
    if story.step is not None:
        of = "" if story.total_steps is None else f"of {t.number(story.total_steps)} steps"
        saved = saved_step(story)
        if saved is None:
            yield KeyFigure(label="Step", value=t.number(story.step), note=of, link="loss")
        else:
            note = f"(reached {t.number(story.step)}) {of}".rstrip()
            value = t.number(saved)
            yield KeyFigure(label="Saved to step", value=value, note=note, link="checkpoints")
    if story.goodput is not None:
        yield KeyFigure(
            label="Goodput",
            value=t.share(story.goodput),
            note=_goodput_note(story, spent),
            tone="good" if story.goodput >= 0.8 else "warn",
            link="time",
        )
    if spent.rank_seconds > 0:
        vain = [each for each in costs(story) if each.partition(" (")[0].endswith(_IN_VAIN)]
        lost = ", ".join(each.partition(" (")[0] for each in vain) or "none lost"
        yield KeyFigure(
            label="GPU time" if story.gpus_per_rank else "Node time",
            value=t.rank_time(spent.rank_seconds, story.gpus_per_rank),
            note=lost,
            link="time",
        )
    count = sum(1 for _ in incidents_of(story))
    faults = sum(1 for _, _, each in incidents_of(story) if is_fault(each))
    yield KeyFigure(
        label="Incidents",
        value=t.number(count),
        note=interruptions(story) or "none",
        tone="warn" if faults else "",
        link="incidents",
    )
    if story.waited_s >= 1:
        queue = "In the queue" if is_slurm_job(story.job) else "Waiting"
        yield KeyFigure(label=queue, value=t.span(story.waited_s), note=_starts(story), link="time")
    yield _results(story)


def _goodput_note(story: s.RunStory, spent: Waterfall) -> str:
    queue = ", queue included," if story.queued_s >= 1 else " by the clock"
    unsaved = f"; {t.span(spent.unsaved_s)} of them not saved" if spent.unsaved_s else ""
    return f"of {t.span(story.elapsed_s)}{queue} went into steps that were kept{unsaved}"


def _results(story: s.RunStory) -> KeyFigure:
    science = [change for change in story.changes if change.science]
    value, note = "unaffected", "nothing that affects them changed"
    skipped = sum(
        row.count
        for attempt in story.attempts
        for launch in attempt.launches
        for row in launch.skipped
        if not row.undone
    )
    if skipped and any(change.parameter == "skipped" for change in science):
        of = "" if story.step is None else f" of {t.number(story.step)}"
        more = f", and {t.plural(len(science) - 1, 'more change')}" if len(science) > 1 else ""
        value, note = f"{t.number(skipped)}{of}", f"updates skipped{more}"
    elif science:
        value, note = t.plural(len(science), "change"), "see what changed"
    tone = "warn" if science else "good"
    return KeyFigure(label="Results", value=value, note=note, tone=tone, link="changes")


def _starts(story: s.RunStory) -> str:
    attempts = t.plural(len(story.attempts), "attempt")
    return f"{attempts}, {t.plural(story.starts, 'restart')}"
