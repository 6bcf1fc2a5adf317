"""Windows of the sample stream that are left out: exact at first, growing where it fails again."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_forge.vocabulary.decision import Incident
from slurm_forge.vocabulary.plan import SampleWindow

#: How much longer a window becomes at least when what lies right behind it is bad too.
GROWTH = 4
#: Without a limit of the user's no more is left out than the samples of so many steps, or than
#: this share of what was trained on so far, whichever is more.
MOST_STEPS = 256
MOST_SHARE = 0.001


def left_out(
    skipped: Iterable[SampleWindow], incident: Incident, most: int | None = None
) -> tuple[SampleWindow, ...] | str:
    """The windows to leave out after an incident, or why it must not be that many samples.

    At first exactly the samples of the bad steps.  Where they touch a window that is left out
    already, overlap it, or lie less than their own length behind it, that window was too short: it
    grows to ``GROWTH`` times its length, and over the bad steps in any case.  ``most`` is the
    limit on all samples together; a window grows no further than that.
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
            f"{total(after)} samples would be left out, and no more than {limit} may be "
            "(most_skipped)"
        )
    return after


def too_short(skipped: Iterable[SampleWindow], incident: Incident) -> bool:
    """Whether the bad steps lie at a window that is left out already: it did not cover them."""
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
    """Samples in all of them; they must be apart from each other."""
    return sum(each.stop - each.first for each in windows)


def windows_text(windows: Iterable[SampleWindow]) -> str:
    """``948224-948735, 950272-950783`` (first and last sample), or ``-`` for none."""
    return ", ".join(f"{each.first}-{each.stop - 1}" for each in windows) or "-"


def _same_place(window: SampleWindow, bad: SampleWindow, size: int) -> bool:
    return window.first <= bad.stop and bad.first < window.stop + size


def _common(windows: Iterable[SampleWindow], bad: SampleWindow) -> int:
    """Samples of ``bad`` that are left out already: its steps did not take those."""
    return sum(max(0, min(each.stop, bad.stop) - max(each.first, bad.first)) for each in windows)


def _all(others: Iterable[SampleWindow], window: SampleWindow) -> int:
    return total(merged([*others, window]))


def _per_step(incident: Incident, size: int) -> int:
    """Samples of one step, as far as the incident tells."""
    if incident.step is None or incident.onset is None:
        return size
    steps = incident.step - incident.onset + 1
    return size // steps if steps > 0 and size % steps == 0 else size


def _most(incident: Incident, size: int) -> int:
    bad = incident.window
    so_far = 0 if bad is None else bad.first
    return max(MOST_STEPS * _per_step(incident, size), int(MOST_SHARE * so_far))
