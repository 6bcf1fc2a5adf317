"""Combine what the ranks found out about a bad step into one answer.  Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from slurm_forge.vocabulary.cause import Evidence
from slurm_forge.vocabulary.json_value import Json

#: (epoch from 0, index into the dataset), as training/core/sample_order.py has it.
#: Epoch and index, or what a source calls a sample.
_SampleId = tuple[int, int] | int | str

#: How many names, ranks, samples and ranges are listed; the rest is only counted.
MOST_NAMES, MOST_SAMPLES = 3, 8
_MOST_RANKS, _MOST_RANGES, _MOST_HOSTS = 3, 4, 4
_LONGEST_NAME, _LONGEST_TEXT = 120, 300


class Blamed(Protocol):
    """A parameter's gradient in the bad step, over all ranks."""

    @property
    def name(self) -> str:
        """The parameter's name."""

    @property
    def norm(self) -> float:
        """The norm of its gradient."""

    @property
    def finite(self) -> bool:
        """Whether that norm is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFindings:
    """One rank's findings.

    ``was_bad``: its loss was not finite in the step itself.  ``blamed``: parameters whose gradients
    were not finite in it, how many, and ``largest``, the largest one if all were finite.  ``state``
    and ``data`` are bad without any computation: weights and the like (``NaN in …``), and samples
    that contain NaN or infinity.

    The rest describes the replay: ``replayed`` to its end or ``failed`` with an error; ``random``
    if it drew other random numbers than the step.  ``loss`` and ``gradient`` say how they were bad
    (``NaN``), and are empty if they were not; ``parameters`` are those with a bad gradient, where
    it began first; ``layer`` the first module with a bad output in spite of good inputs;
    ``micro_batches`` the bad ones, counted from 1; ``positions`` their samples in the stream, first
    and last, ``samples`` their ids; ``count`` is that of ``Loss(sum, count)``.
    """

    rank: int
    host: str
    was_bad: bool = False
    blamed: tuple[str, ...] = ()
    blamed_in_all: int = 0
    largest: str = ""
    state: tuple[str, ...] = ()
    data: tuple[_SampleId, ...] = ()
    replayed: bool = False
    failed: str = ""
    random: bool = False
    loss: str = ""
    gradient: str = ""
    parameters: tuple[str, ...] = ()
    bad_gradients: int = 0
    gradients: int = 0
    layer: str = ""
    micro_batches: tuple[int, ...] = ()
    samples: tuple[_SampleId, ...] = ()
    positions: tuple[tuple[int, int], ...] = ()
    count: float | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the replay was not finite on this rank."""
        return bool(self.loss or self.gradient)

    @property
    def place(self) -> str:
        """``rank 9 (n05)``."""
        return f"rank {self.rank} ({shortened(self.host, 60)})"

    def to_json(self) -> Json:
        """The message to rank 0: without empty fields it stays below two kilobytes."""
        return {key: value for key, value in asdict(self).items() if value not in ((), "", None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The findings about a bad step; the same on every rank, and small however many there are.

    ``repeats``: recomputed, it was bad again (data or model), or was not (hardware is suspected);
    None if that could not be determined.  ``rank`` and ``hosts`` are where it began, if known: a
    node is suspected only if ``repeats`` is False.  ``state`` names non-finite values in memory, in
    which case no other batch would help; ``data`` samples that are not finite themselves;
    ``samples`` and ``positions`` (in the stream, first and last) the contents of bad micro-batches.
    """

    repeats: bool | None
    rank: int | None = None
    hosts: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    layer: str = ""
    state: tuple[str, ...] = ()
    data: tuple[_SampleId, ...] = ()
    samples: tuple[_SampleId, ...] = ()
    positions: tuple[tuple[int, int], ...] = ()
    told: tuple[Evidence, ...] = ()

    def evidence(self) -> tuple[Evidence, ...]:
        """The same in words: at most eight entries of a few hundred bytes each."""
        return self.told


def merge_findings(ranks: Sequence[RankFindings], *, no_replay: str = "") -> Examination:
    """Combine the findings of all ranks; ``no_replay`` says why nothing was recomputed."""
    bad = [each for each in ranks if each.is_bad]
    counts = [each.count for each in ranks if each.count is not None]
    total = sum(counts)
    empty = bool(counts) and (total == 0 or not math.isfinite(total))
    repeats: bool | None = None
    if bad or empty:
        repeats = True
    elif all(each.replayed for each in ranks):
        repeats = False
    # A mean over all ranks is bad on all of them, and then does not show where it began.
    was_bad = [each for each in ranks if each.was_bad]
    if len(was_bad) == len(ranks) > 1:
        was_bad = []
    culprits = [] if empty and not bad else bad or was_bad
    hosts = _unique(each.host for each in culprits)
    if not hosts and repeats is False:
        everywhere = _unique(each.host for each in ranks)
        hosts = everywhere if len(everywhere) == 1 else ()
    worst = min(bad, key=_vagueness) if bad else None
    parameters = worst.parameters if worst else _unique(n for each in ranks for n in each.blamed)
    state = _unique(text for each in ranks for text in each.state)
    data = _unique(sample for each in ranks for sample in each.data)
    examination = Examination(
        repeats=repeats,
        rank=_first_rank(culprits, worst, ranks),
        hosts=hosts[:_MOST_HOSTS],
        parameters=parameters[:MOST_NAMES],
        layer=next((each.layer for each in bad if each.layer), ""),
        state=state[:MOST_NAMES],
        data=data[:MOST_SAMPLES],
        samples=_unique(sample for each in bad for sample in each.samples)[:MOST_SAMPLES],
        positions=_ranges(part for each in bad for part in each.positions),
    )
    evidence = [
        *_where(bad, was_bad, worst),
        *_in_memory(ranks, state),
        *_in_the_data(data),
        *([] if bad else _blamed(ranks)),
        *_failures(ranks),
        Evidence("replay", no_replay or _verdict(examination, empty, ranks)),
    ]
    evidence = [Evidence(each.source, shortened(each.text, _LONGEST_TEXT)) for each in evidence]
    return replace(examination, told=tuple(evidence))


def not_finite(value: float) -> str:
    """``NaN``, ``infinite``, or nothing for a finite number."""
    if math.isfinite(value):
        return ""
    return "NaN" if math.isnan(value) else "infinite"


def shortened(text: str, most: int = _LONGEST_NAME) -> str:
    """The text without its middle if it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 3]}…{text[len(text) - (most - most // 3 - 1) :]}"


def _vagueness(findings: RankFindings) -> tuple[bool, int, int]:
    """A rank that knows the layer is most specific, then the one with the fewest bad gradients."""
    return not findings.layer, findings.bad_gradients or 1 << 30, findings.rank


def _first_rank(
    culprits: Sequence[RankFindings], worst: RankFindings | None, ranks: Sequence[RankFindings]
) -> int | None:
    if len(ranks) == 1:
        return ranks[0].rank
    if not culprits or (len(culprits) == len(ranks)):
        return None  # equal on all of them: it did not begin on one
    return worst.rank if worst is not None else culprits[0].rank


def _where(
    bad: Sequence[RankFindings], was_bad: Sequence[RankFindings], worst: RankFindings | None
) -> list[Evidence]:
    """One entry for each of the first ranks; the most specific one comes first."""
    if worst is not None:
        listed = [worst, *(each for each in bad if each is not worst)][:_MOST_RANKS]
        evidence = [Evidence(each.place, _what(each)) for each in listed]
    else:
        listed = list(was_bad[:_MOST_RANKS])
        evidence = [Evidence(each.place, "its loss was not finite in the step") for each in listed]
    more = len(bad or was_bad) - len(listed)
    if more > 0:
        evidence[-1] = Evidence(
            evidence[-1].source, f"{evidence[-1].text}; {more} more ranks likewise"
        )
    return evidence


def _what(findings: RankFindings) -> str:
    if findings.loss:
        text = f"loss is {findings.loss}"
    elif findings.gradient and findings.parameters:
        text = f"gradient of {findings.parameters[0]} is {findings.gradient}"
        if findings.bad_gradients > 1:
            text += f" ({findings.bad_gradients} of {findings.gradients} gradients)"
    else:
        text = f"gradient is {findings.gradient}"
    if findings.layer:
        text += f", first in the output of {findings.layer}"
    if findings.micro_batches:
        text += f"; micro-batch {', '.join(map(str, findings.micro_batches))}"
    return text


def _in_memory(ranks: Sequence[RankFindings], state: Sequence[str]) -> list[Evidence]:
    if not state:
        return []
    first = next(each for each in ranks if each.state)
    more = f" and {len(state) - MOST_NAMES} more" if len(state) > MOST_NAMES else ""
    return [Evidence("memory", f"{', '.join(state[:MOST_NAMES])}{more}, on {first.place}")]


def _in_the_data(data: Sequence[_SampleId]) -> list[Evidence]:
    if not data:
        return []
    return [Evidence("data", f"NaN or infinity in {_ids(data)}")]


def _blamed(ranks: Sequence[RankFindings]) -> list[Evidence]:
    """Gradients of the step itself; with sharded parameters each rank reports its own parts."""
    most = max(ranks, key=lambda each: each.blamed_in_all)
    if most.blamed:
        more = f" and {most.blamed_in_all - 1} more" if most.blamed_in_all > 1 else ""
        return [Evidence("gradients", f"not finite: {most.blamed[0]}{more}")]
    largest = next((each.largest for each in ranks if each.largest), "")
    return [Evidence("gradients", f"the largest in the step: {largest}")] if largest else []


def _failures(ranks: Sequence[RankFindings]) -> list[Evidence]:
    failed = [each for each in ranks if each.failed]
    if not failed:
        return []
    more = f"; so did {len(failed) - 1} more ranks" if len(failed) > 1 else ""
    return [Evidence(failed[0].place, f"the examination failed: {failed[0].failed}{more}")]


def _verdict(examination: Examination, empty: bool, ranks: Sequence[RankFindings]) -> str:
    if examination.repeats is None:
        some = any(each.replayed for each in ranks)
        text = "the same step could not be computed again"
        return f"{text} on all ranks; where it could it is finite" if some else text
    if examination.repeats:
        text = "the same step computed again is not finite either: "
        if empty:
            return text + "Loss.count is 0 over all ranks, there is nothing to take the mean of"
        if examination.state:
            text += "the state is bad already, whatever the data"
        elif examination.data:
            text += "data"
        else:
            text += "data or model"
        return text + _samples(examination)
    other = any(each.random for each in ranks)
    text = "the same step computed again is finite"
    text += ", with other random numbers: probably transient" if other else ": transient"
    return text + (
        f"; suspect {', '.join(examination.hosts)}" if examination.hosts else "; no node stands out"
    )


def _samples(examination: Examination) -> str:
    parts = [f"samples {', '.join(_range(part) for part in examination.positions)}"]
    if not examination.positions:
        parts = []
    if examination.samples:
        parts.append(_ids(examination.samples))
    return "".join(f"; {part}" for part in parts)


def _range(part: tuple[int, int]) -> str:
    first, last = part
    return str(first) if first == last else f"{first}-{last}"


def _ids(samples: Sequence[_SampleId]) -> str:
    """``dataset[17], [4711] of epoch 0``: the samples to examine."""
    listed = samples[:MOST_SAMPLES]
    more = ", …" if len(samples) >= MOST_SAMPLES else ""
    pairs = [each for each in listed if isinstance(each, tuple)]
    if len(pairs) < len(listed):
        return f"samples {', '.join(shortened(str(each)) for each in listed)}{more}"
    text = ", ".join(f"[{index}]" for _, index in pairs)
    epochs = ", ".join(map(str, _unique(epoch for epoch, _ in pairs)))
    return f"dataset{text}{more} of epoch {epochs}"


def _ranges(parts: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """First and last, merged if adjacent; only the outer ends if there are too many."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(parts):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    if len(joined) > _MOST_RANGES:
        return ((joined[0][0], joined[-1][1]),)
    return tuple(joined)


def _unique(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
