"""What ``doctor`` found, section by section: facts into sentences with a mark.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from slurm_forge.launch.render.prediction import Foreseen
from slurm_forge.recovery.policy.prediction import (
    BroughtBack,
    FirstSignal,
    Prediction,
    ResumesFrom,
)
from slurm_forge.report.text import clean, span
from slurm_forge.site.comparing import Difference, Kind
from slurm_forge.site.model import PreemptionMode
from slurm_forge.units import words_for_duration

__all__ = [
    "Mark",
    "PlaceShown",
    "Section",
    "Told",
    "clock_difference",
    "place_shown",
    "places_section",
    "site_section",
]

_CLOCK_S = 5.0
#: Of differences, QOS and partitions that nobody can read all of.
_SHOWN = 12


class Mark(str, Enum):
    """How much a line matters."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Told:
    """One line, and what the user does next where something is wrong."""

    mark: Mark
    text: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Lines about one thing; ``about`` stands beside the title."""

    title: str
    about: str = ""
    told: tuple[Told, ...] = ()


def clock_difference(ahead_s: float | None, whose: str, consequence: str) -> Iterator[Told]:
    """A line where this machine's clock is ahead of, or behind, ``whose`` by several seconds."""
    if ahead_s is not None and abs(ahead_s) > _CLOCK_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        yield Told(
            Mark.WARNING,
            f"this machine's clock is {span(abs(ahead_s))} {side} {whose}. {consequence}",
            "Tell the administrators: clocks of a cluster are kept equal (chronyc tracking).",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceShown:
    """A prediction as ``doctor --json`` prints it: Slurm's words, durations in seconds."""

    partition: str | None
    qos: str | None
    is_default: bool
    usable: bool
    why_not: str | None
    from_slurm: bool
    preempted_by: tuple[str, ...]
    mode: str | None
    notice_s: float | None
    kill_wait_s: float
    exempt_s: float | None
    first_signal: str
    back_by: str
    same_job: bool | None
    delay_s: float | None
    resumes_from: str
    limit_s: float | None
    lead_s: float | None
    limit_back_by: str
    impossible: tuple[str, ...]
    caveats: tuple[str, ...]


def site_section(
    name: str,
    file: str,
    because: str,
    *,
    differences: tuple[Difference, ...] = (),
    unchecked: tuple[str, ...] = (),
    compared: bool,
    described: bool,
) -> Section:
    """What the site file says otherwise; ``described`` is False for ``generic``."""
    told: list[Told] = []
    if not described:
        told.append(
            Told(
                Mark.NOTE,
                "no site file describes this cluster: what Slurm itself says is used.",
                "slurm-forge sites detect --write makes one of it, for you to complete.",
            )
        )
    elif not compared:
        told.append(Told(Mark.WARNING, "it was compared with nothing: Slurm could not be asked."))
    wrong = [each for each in differences if each.kind is not Kind.NOT_IN_FILE]
    lacking = [each for each in differences if each.kind is Kind.NOT_IN_FILE]
    for each in wrong[:_SHOWN]:
        told.append(
            Told(
                Mark.PROBLEM,
                f"{clean(each.words(file), 300)} ({each.told_by}).",
                "Correct the file; a file of yours in ~/.config/slurm_forge/sites comes first.",
            )
        )
    if len(wrong) > _SHOWN:
        told.append(Told(Mark.PROBLEM, f"… and {len(wrong) - _SHOWN} more (see --json)."))
    if described:
        told += [Told(Mark.NOTE, f"{clean(each.words(file), 300)}.") for each in lacking[:_SHOWN]]
        if len(lacking) > _SHOWN:
            told.append(Told(Mark.NOTE, f"… and {len(lacking) - _SHOWN} more (see --json)."))
        if compared and not wrong:
            told.append(Told(Mark.OK, "nothing in it contradicts Slurm."))
        if unchecked:
            told.append(
                Told(Mark.OK, f"known to the file alone, Slurm can't tell: {', '.join(unchecked)}.")
            )
    return Section(
        "site file",
        f"{clean(name, 64)}   {clean(file, 200)}   ({clean(because, 120)})",
        tuple(told),
    )


def places_section(places: tuple[Foreseen, ...], *, of_job: str | None = None) -> Section:
    """What happens to a run in each place; ``of_job`` is the name of the one that is meant.

    Places of which the same is true share a line.
    """
    lines: dict[Told, list[Foreseen]] = {}
    for each in places:
        for told in _place(each, of_job=of_job is not None):
            lines.setdefault(told, []).append(each)
    listed = [
        Told(told.mark, f"{_names(of)}: {told.text}", told.next_step) for told, of in lines.items()
    ]
    if not places:
        listed.append(Told(Mark.WARNING, "no partition is known: nothing can be foretold."))
    about = "" if of_job is None else clean(of_job, 64)
    return Section("what happens to a run", about, tuple(listed))


def place_shown(place: Foreseen) -> PlaceShown:
    """For programs."""
    found = place.prediction
    return PlaceShown(
        partition=place.partition,
        qos=place.qos,
        is_default=place.is_default,
        usable=place.refused is None,
        why_not=place.refused,
        from_slurm=place.from_slurm,
        preempted_by=place.by,
        mode=None if found.mode is None else found.mode.value,
        notice_s=_seconds(found.notice),
        kill_wait_s=found.kill_wait.total_seconds(),
        exempt_s=_seconds(found.exempt),
        first_signal=found.first_signal.value,
        back_by=found.back_by.value,
        same_job=found.same_job,
        delay_s=_seconds(found.delay),
        resumes_from=found.resumes_from.value,
        limit_s=_seconds(place.limit),
        lead_s=_seconds(found.lead),
        limit_back_by=found.limit_back_by.value,
        impossible=found.impossible,
        caveats=found.caveats,
    )


def _place(place: Foreseen, *, of_job: bool) -> Iterator[Told]:
    found = place.prediction
    if place.refused is not None:
        mark = Mark.PROBLEM if of_job else Mark.NOTE
        yield Told(mark, f"not for you: {clean(place.refused, 160)}.")
        return
    if of_job and place.too_long is not None and place.limit is not None:
        yield Told(
            Mark.PROBLEM,
            f"the job asks for {_words(place.limit)}, and the longest time limit is "
            f"{_words(place.too_long)}: Slurm refuses it, or lets it wait for ever.",
            "Shorten resources.time: a run goes on beyond its time limit by itself.",
        )
    by_file = not place.from_slurm and found.mode is not None
    source = " (By the site file: Slurm does not say.)" if by_file else ""
    mark = Mark.OK if found.mode is not None else Mark.NOTE
    yield Told(mark, f"{_preemption(place)}{source} {_limit(place, of_job=of_job)}")
    stuck = BroughtBack.PERSON in (found.back_by, found.limit_back_by)
    for text in found.impossible:
        step = "Use template: array where the centre allows job arrays." if stuck else ""
        yield Told(Mark.WARNING, text, step)
    for text in found.caveats:
        yield Told(Mark.NOTE, text)


def _names(places: list[Foreseen]) -> str:
    """Of places that share their QOS the QOS is said once."""
    shared = {each.qos for each in places}
    partitions = [clean(each.partition, 64) for each in places if each.partition]
    if len(places) == 1 or len(partitions) < len(places) or len(shared) > 1:
        shown = [_name(each) for each in places[:_SHOWN]]
        return "; ".join(shown) + (" …" if len(places) > _SHOWN else "")
    some = ", ".join(partitions[:_SHOWN]) + (", …" if len(partitions) > _SHOWN else "")
    qos = places[0].qos
    return f"partitions {some}" + (f", QOS {clean(qos, 64)}" if qos else "")


def _name(place: Foreseen) -> str:
    parts = [f"partition {clean(place.partition, 64)}"] if place.partition else []
    parts += [f"QOS {clean(place.qos, 64)}"] if place.qos else []
    return ", ".join(parts) or "a job"


def _preemption(place: Foreseen) -> str:
    found = place.prediction
    match found.mode:
        case None:
            return "nobody says what a preemption does."
        case PreemptionMode.OFF:
            return "jobs are not preempted."
        case PreemptionMode.SUSPEND:
            return f"preempted{_by(place)}, jobs are suspended in place and go on later."
        case _:
            return f"{_ended(place)} {_back(found)}"


def _ended(place: Foreseen) -> str:
    found = place.prediction
    word = "requeues" if found.mode is PreemptionMode.REQUEUE else "cancels"
    text = f"preempted{_by(place)}, "
    if found.notice is None:
        text += f"Slurm {word} the job after a notice of unknown length"
    elif found.notice == timedelta(0):
        text += f"Slurm {word} the job without notice"
    else:
        text += f"ranks get {_signal(found)}, and Slurm {word} the job {_words(found.notice)} later"
    if found.exempt:
        text += f", never in its first {_words(found.exempt)}"
    return f"{text}."


def _signal(found: Prediction) -> str:
    return (
        found.first_signal.value
        if found.first_signal is FirstSignal.SIGTERM
        else "the signal of --signal"
    )


def _by(place: Foreseen) -> str:
    if not place.by:
        return ""
    what = "QOS" if place.by_qos else "partition"
    shown = ", ".join(clean(name, 40) for name in place.by[:3])
    return f" (by {what} {shown}{', …' if len(place.by) > 3 else ''})"


def _back(found: Prediction) -> str:
    saved = found.resumes_from is ResumesFrom.LAST_SAVE
    match found.back_by:
        case BroughtBack.RUN:
            how = "requeues itself (same job id)"
        case BroughtBack.SUCCESSOR:
            how = "submits a successor"
        case BroughtBack.CHAIN:
            how = "goes on in the next task of its array"
        case BroughtBack.PERSON:
            how = "is held until a person lets it go on"
        case _:
            how = "is put back into the queue by Slurm (same job id)"
    when = ""
    if found.delay is not None:
        when = f"; it can start again about {_words(found.delay)} later"
    first = "The run saves and " if saved else "The run "
    lost = "" if saved else " What came after the last periodic checkpoint is computed again."
    return f"{first}{how}{when}.{lost}"


def _limit(place: Foreseen, *, of_job: bool) -> str:
    found = place.prediction
    if place.limit is None or found.lead is None:
        default = place.default_time
        asks = f"; a job that asks for none gets {_words(default)}" if default else ""
        # None of QOS, associations and partition says one: whoever was asked said "unlimited".
        return f"Slurm names no longest time limit{asks}."
    which = "Its time limit is" if of_job else "The longest time limit is"
    back = {
        BroughtBack.RUN: "requeues itself",
        BroughtBack.SUCCESSOR: "submits a successor",
        BroughtBack.CHAIN: "goes on in the next task of its array",
        BroughtBack.PERSON: "is held for a person",
    }.get(found.limit_back_by, "comes back")
    return (
        f"{which} {_words(place.limit)}: the run saves {_words(found.lead)} before it, and {back}."
    )


def _words(value: timedelta) -> str:
    return words_for_duration(value)


def _seconds(value: timedelta | None) -> float | None:
    return None if value is None else value.total_seconds()
