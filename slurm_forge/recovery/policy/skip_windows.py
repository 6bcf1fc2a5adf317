"""Windows of the sample stream that are skipped: exact at first, growing if it fails again."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_forge.vocabulary.decision import Incident
from slurm_forge.vocabulary.plan import SampleWindow

#: How much longer a window becomes at least if what lies right behind it is bad, too.
GROWTH = 4
#: Without a limit by the user, at most the samples of this many steps are skipped, or this share
#: of what was trained on so far, whichever is more.
MOST_STEPS = 256
MOST_SHARE = 0.001


def left_out(
    skipped: Iterable[SampleWindow], incident: Incident, most: int | None = None
) -> tuple[SampleWindow, ...] | str:
    """The windows to skip after an incident, or why that would be too many samples.

    At first exactly the samples of the bad steps.  If they touch a skipped window, overlap it, or
    lie less than its length behind it, that window was too short: it grows to ``GROWTH`` times its
    length, and over the bad steps in any case.  ``most`` limits all samples together; a window
    does not grow beyond that.
    """
    before = merged(skipped)
    bad = incident.window
    if bad is None or not 0 <= bad.first < bad.stop:
        return before
    size = bad.stop - bad.first
    size = size - _common(before, bad) or size
    growing = [each for each in before if _same_place(each, bad, size)]
    others = [each for each in before if each not in growing]
    first = min([bad.first, *(each.first for each in growing)])
    needed = max([bad.stop, *(each.stop for each in growing)])
    length = GROWTH * total(growing)
    limit = _most(incident, size) if most is None else most
    samples_left = limit - total(others)
    window = SampleWindow(first, max(needed, first + length))
    if _all(others, window) > limit:
        step = _per_step(incident, size)
        shorter = first + samples_left // step * step
        window = SampleWindow(first, max(needed, shorter))
    after = merged([*others, window])
    if total(after) > max(limit, total(before)):
        return (
            f"{total(after)} samples would be skipped, and no more than {limit} may be "
            "(most_skipped)"
        )
    return after


def too_short(skipped: Iterable[SampleWindow], incident: Incident) -> bool:
    """Whether the bad steps lie at a skipped window, which then did not cover them."""
    bad, before = incident.window, merged(skipped)
    if bad is None:
        return False
    size = bad.stop - bad.first
    size = size - _common(before, bad) or size
    return any(_same_place(each, bad, size) for each in before)


def merged(windows: Iterable[SampleWindow]) -> tuple[SampleWindow, ...]:
    """Ordered, apart from each other, none of them empty."""
    result: list[SampleWindow] = []
    for each in sorted(windows):
        if each.stop <= each.first:
            continue
        if result and each.first <= result[-1].stop:
            result[-1] = SampleWindow(result[-1].first, max(result[-1].stop, each.stop))
        else:
            result.append(each)
    return tuple(result)


def total(windows: Iterable[SampleWindow]) -> int:
    """The number of samples in all windows, which must be disjoint."""
    return sum(each.stop - each.first for each in windows)


def windows_text(windows: Iterable[SampleWindow]) -> str:
    """``948224-948735, 950272-950783`` (first and last sample), or ``-`` for none."""
    return ", ".join(f"{each.first}-{each.stop - 1}" for each in windows) or "-"


def _same_place(window: SampleWindow, bad: SampleWindow, size: int) -> bool:
    return window.first <= bad.stop and bad.first < window.stop + size


def _common(windows: Iterable[SampleWindow], bad: SampleWindow) -> int:
    """Samples of ``bad`` that are skipped already: its steps did not use them."""
    return sum(max(0, min(each.stop, bad.stop) - max(each.first, bad.first)) for each in windows)


def _all(others: Iterable[SampleWindow], window: SampleWindow) -> int:
    return total(merged([*others, window]))


def _per_step(incident: Incident, size: int) -> int:
    """Samples per step, as far as the incident shows."""
    if incident.step is None or incident.onset is None:
        return size
    steps = incident.step - incident.onset + 1
    return size // steps if steps > 0 and size % steps == 0 else size


def _most(incident: Incident, size: int) -> int:
    bad = incident.window
    so_far = 0 if bad is None else bad.first
    return max(MOST_STEPS * _per_step(incident, size), int(MOST_SHARE * so_far))
