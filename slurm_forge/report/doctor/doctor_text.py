"""The sections of ``doctor`` as a person reads them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from slurm_forge.report.doctor.sections import (
    Mark,
    Section,
    Told,
)
from slurm_forge.report.text import plural

__all__ = ["doctor_text"]

_WIDTH = 100
_MARKS = max(len(mark.value) for mark in Mark)


def doctor_text(sections: Iterable[Section]) -> str:
    """All sections, and at the end how much is wrong."""
    listed = tuple(sections)
    blocks = ["\n".join(_section(each)) for each in listed if each.told]
    return "\n\n".join([*blocks, _sum(listed)]) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"{section.title}   {section.about}".rstrip()
    for told in section.told:
        yield from _told(told)


def _told(told: Told) -> Iterator[str]:
    mark = f"  {told.mark.value:<{_MARKS}}  "
    yield from _wrapped(mark, told.text)
    if told.next_step:
        yield from _wrapped(" " * len(mark) + "-> ", told.next_step)


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _sum(sections: tuple[Section, ...]) -> str:
    marks = [told.mark for section in sections for told in section.told]
    parts = [
        plural(count, mark.value)
        for mark in (Mark.PROBLEM, Mark.WARNING)
        if (count := marks.count(mark))
    ]
    return (", ".join(parts) if parts else "nothing is wrong") + "."
