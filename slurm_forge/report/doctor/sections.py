"""What ``doctor`` found, section by section: facts into sentences with a mark.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from slurm_forge.launch.render.prediction import PreemptionForecast
from slurm_forge.recovery.live_findings import Mark
from slurm_forge.recovery.policy.prediction import (
    BroughtBack,
    FirstSignal,
    Prediction,
    ResumesFrom,
)
from slurm_forge.report.text import clean, span
from slurm_forge.site.comparing import SiteDifference, SiteDifferenceKind
from slurm_forge.site.model import PreemptionMode
from slurm_forge.units import words_for_duration

_CLOCK_S = 5.0
#: Of differences, QOS and partitions that nobody can read all of.
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Remark:
    """One line, and what the user does next where something is wrong."""

    mark: Mark
    text: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class ReportSection:
    """Lines about one thing; ``about`` is printed beside the title."""

    title: str
    about: str = ""
    told: tuple[Remark, ...] = ()


def clock_difference(ahead_s: float | None, whose: str, consequence: str) -> Iterator[Remark]:
    """A line where this machine's clock is ahead of, or behind, ``whose`` by several seconds."""
    if ahead_s is not None and abs(ahead_s) > _CLOCK_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        yield Remark(
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
    differences: tuple[SiteDifference, ...] = (),
    unchecked: tuple[str, ...] = (),
    compared: bool,
    described: bool,
) -> ReportSection:
    """What the site file says otherwise; ``described`` is False for ``generic``."""
    remarks: list[Remark] = []
    if not described:
        remarks.append(
            Remark(
                Mark.NOTE,
                "no site file describes this cluster: what Slurm itself says is used.",
                "slurm-forge sites detect --write drafts one for you to complete.",
            )
        )
    elif not compared:
        remarks.append(Remark(Mark.WARNING, "not compared: Slurm could not be queried."))
    wrong = [each for each in differences if each.kind is not SiteDifferenceKind.NOT_IN_FILE]
    lacking = [each for each in differences if each.kind is SiteDifferenceKind.NOT_IN_FILE]
    for each in wrong[:_SHOWN]:
        remarks.append(
            Remark(
                Mark.PROBLEM,
                f"{clean(each.words(file), 300)} ({each.told_by}).",
                "Correct the file; your own file in ~/.config/slurm_forge/sites takes precedence.",
            )
        )
    if len(wrong) > _SHOWN:
        remarks.append(Remark(Mark.PROBLEM, f"… and {len(wrong) - _SHOWN} more (see --json)."))
    if described:
        remarks += [
            Remark(Mark.NOTE, f"{clean(each.words(file), 300)}.") for each in lacking[:_SHOWN]
        ]
        if len(lacking) > _SHOWN:
            remarks.append(Remark(Mark.NOTE, f"… and {len(lacking) - _SHOWN} more (see --json)."))
        if compared and not wrong:
            remarks.append(Remark(Mark.OK, "nothing in it contradicts Slurm."))
        if unchecked:
            remarks.append(Remark(Mark.OK, f"known from the file alone: {', '.join(unchecked)}."))
    return ReportSection(
        "site file",
        f"{clean(name, 64)}   {clean(file, 200)}   ({clean(because, 120)})",
        tuple(remarks),
    )


def places_section(
    places: tuple[PreemptionForecast, ...], *, of_job: str | None = None
) -> ReportSection:
    """What happens to a run in each place; ``of_job`` is the name of the one that is meant.

    Places of which the same is true share a line.
    """
    lines: dict[Remark, list[PreemptionForecast]] = {}
    for each in places:
        for remark in _place(each, of_job=of_job is not None):
            lines.setdefault(remark, []).append(each)
    listed = [
        Remark(remark.mark, f"{_names(of)}: {remark.text}", remark.next_step)
        for remark, of in lines.items()
    ]
    if not places:
        listed.append(Remark(Mark.WARNING, "no partition is known: nothing can be predicted."))
    about = "" if of_job is None else clean(of_job, 64)
    return ReportSection("what happens to a run", about, tuple(listed))


def place_shown(place: PreemptionForecast) -> PlaceShown:
    """For programs."""
    prediction = place.prediction
    return PlaceShown(
        partition=place.partition,
        qos=place.qos,
        is_default=place.is_default,
        usable=place.refused is None,
        why_not=place.refused,
        from_slurm=place.from_slurm,
        preempted_by=place.preemptors,
        mode=None if prediction.mode is None else prediction.mode.value,
        notice_s=_seconds(prediction.notice),
        kill_wait_s=prediction.kill_wait.total_seconds(),
        exempt_s=_seconds(prediction.exempt),
        first_signal=prediction.first_signal.value,
        back_by=prediction.back_by.value,
        same_job=prediction.same_job,
        delay_s=_seconds(prediction.delay),
        resumes_from=prediction.resumes_from.value,
        limit_s=_seconds(place.limit),
        lead_s=_seconds(prediction.lead),
        limit_back_by=prediction.limit_back_by.value,
        impossible=prediction.impossible,
        caveats=prediction.caveats,
    )


def _place(place: PreemptionForecast, *, of_job: bool) -> Iterator[Remark]:
    prediction = place.prediction
    if place.refused is not None:
        mark = Mark.PROBLEM if of_job else Mark.NOTE
        yield Remark(mark, f"not available to you: {clean(place.refused, 160)}.")
        return
    if of_job and place.too_long is not None and place.limit is not None:
        yield Remark(
            Mark.PROBLEM,
            f"the job asks for {_words(place.limit)}, but the longest time limit is "
            f"{_words(place.too_long)}: Slurm refuses it, or lets it wait forever.",
            "Shorten resources.time: a run continues beyond its time limit by itself.",
        )
    by_file = not place.from_slurm and prediction.mode is not None
    source = " (By the site file: Slurm does not say.)" if by_file else ""
    mark = Mark.OK if prediction.mode is not None else Mark.NOTE
    yield Remark(mark, f"{_preemption(place)}{source} {_limit(place, of_job=of_job)}")
    stuck = BroughtBack.PERSON in (prediction.back_by, prediction.limit_back_by)
    for text in prediction.impossible:
        step = "Use template: array where the centre allows job arrays." if stuck else ""
        yield Remark(Mark.WARNING, text, step)
    for text in prediction.caveats:
        yield Remark(Mark.NOTE, text)


def _names(places: list[PreemptionForecast]) -> str:
    """Of places that share their QOS the QOS is said once."""
    shared = {each.qos for each in places}
    partitions = [clean(each.partition, 64) for each in places if each.partition]
    if len(places) == 1 or len(partitions) < len(places) or len(shared) > 1:
        shown = [_name(each) for each in places[:_SHOWN]]
        return "; ".join(shown) + (" …" if len(places) > _SHOWN else "")
    some = ", ".join(partitions[:_SHOWN]) + (", …" if len(partitions) > _SHOWN else "")
    qos = places[0].qos
    return f"partitions {some}" + (f", QOS {clean(qos, 64)}" if qos else "")


def _name(place: PreemptionForecast) -> str:
    parts = [f"partition {clean(place.partition, 64)}"] if place.partition else []
    parts += [f"QOS {clean(place.qos, 64)}"] if place.qos else []
    return ", ".join(parts) or "a job"


def _preemption(place: PreemptionForecast) -> str:
    prediction = place.prediction
    match prediction.mode:
        case None:
            return "what a preemption does is unknown."
        case PreemptionMode.OFF:
            return "jobs are not preempted."
        case PreemptionMode.SUSPEND:
            return f"preempted{_by(place)}, jobs are suspended in place and resumed later."
        case _:
            return f"{_ended(place)} {_back(prediction)}"


def _ended(place: PreemptionForecast) -> str:
    forecast = place.prediction
    word = "requeues" if forecast.mode is PreemptionMode.REQUEUE else "cancels"
    text = f"preempted{_by(place)}, "
    if forecast.notice is None:
        text += f"Slurm {word} the job after a notice of unknown length"
    elif forecast.notice == timedelta(0):
        text += f"Slurm {word} the job without notice"
    else:
        later = f"{_words(forecast.notice)} later"
        text += f"ranks get {_signal(forecast)}, and Slurm {word} the job {later}"
    if forecast.exempt:
        text += f", never in its first {_words(forecast.exempt)}"
    return f"{text}."


def _signal(prediction: Prediction) -> str:
    return (
        prediction.first_signal.value
        if prediction.first_signal is FirstSignal.SIGTERM
        else "the signal of --signal"
    )


def _by(place: PreemptionForecast) -> str:
    if not place.preemptors:
        return ""
    what = "QOS" if place.by_qos else "partition"
    shown = ", ".join(clean(name, 40) for name in place.preemptors[:3])
    return f" (by {what} {shown}{', …' if len(place.preemptors) > 3 else ''})"


def _back(prediction: Prediction) -> str:
    saved = prediction.resumes_from is ResumesFrom.LAST_SAVE
    match prediction.back_by:
        case BroughtBack.RUN:
            how = "requeues itself (same job id)"
        case BroughtBack.SUCCESSOR:
            how = "submits a successor"
        case BroughtBack.CHAIN:
            how = "continues in the next task of its array"
        case BroughtBack.PERSON:
            how = "is held until you requeue it"
        case _:
            how = "is requeued by Slurm (same job id)"
    when = ""
    if prediction.delay is not None:
        when = f"; it can start again about {_words(prediction.delay)} later"
    first = "The run saves and " if saved else "The run "
    lost = "" if saved else " Work after the last periodic checkpoint is repeated."
    return f"{first}{how}{when}.{lost}"


def _limit(place: PreemptionForecast, *, of_job: bool) -> str:
    forecast = place.prediction
    if place.limit is None or forecast.lead is None:
        default = place.default_time
        asks = f"; a job that asks for none gets {_words(default)}" if default else ""
        # Neither QOS, nor associations, nor partition has one: all of them said "unlimited".
        return f"Slurm names no longest time limit{asks}."
    which = "Its time limit is" if of_job else "The longest time limit is"
    back = {
        BroughtBack.RUN: "requeues itself",
        BroughtBack.SUCCESSOR: "submits a successor",
        BroughtBack.CHAIN: "continues in the next task of its array",
        BroughtBack.PERSON: "is held until you requeue it",
    }.get(forecast.limit_back_by, "comes back")
    lead = _words(forecast.lead)
    return f"{which} {_words(place.limit)}: the run saves {lead} before it, and {back}."


def _words(value: timedelta) -> str:
    return words_for_duration(value)


def _seconds(value: timedelta | None) -> float | None:
    return None if value is None else value.total_seconds()
