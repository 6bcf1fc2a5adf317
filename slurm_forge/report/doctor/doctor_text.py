"""The sections of ``doctor`` as a person reads them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from slurm_forge.recovery.live_findings import Mark
from slurm_forge.report.doctor.sections import Remark, ReportSection
from slurm_forge.report.text import plural

_WIDTH = 100
_MARKS = max(len(mark.value) for mark in Mark)


def doctor_text(sections: Iterable[ReportSection]) -> str:
    """All sections, and at the end how much is wrong."""
    listed = tuple(sections)
    blocks = ["\n".join(_section(each)) for each in listed if each.told]
    return "\n\n".join([*blocks, _sum(listed)]) + "\n"


def _section(section: ReportSection) -> Iterator[str]:
    yield f"{section.title}   {section.about}".rstrip()
    for remark in section.told:
        yield from _remark_lines(remark)


def _remark_lines(remark: Remark) -> Iterator[str]:
    mark = f"  {remark.mark.value:<{_MARKS}}  "
    yield from _wrapped(mark, remark.text)
    if remark.next_step:
        yield from _wrapped(" " * len(mark) + "-> ", remark.next_step)


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _sum(sections: tuple[ReportSection, ...]) -> str:
    marks = [remark.mark for section in sections for remark in section.told]
    parts = [
        plural(count, mark.value)
        for mark in (Mark.PROBLEM, Mark.WARNING)
        if (count := marks.count(mark))
    ]
    return (", ".join(parts) if parts else "nothing is wrong") + "."
