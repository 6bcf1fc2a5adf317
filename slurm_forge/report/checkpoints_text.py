"""The text of the verbs on checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import tzinfo

from slurm_forge.report import text as t
from slurm_forge.report.checkpoints import CheckpointLine, CheckpointsListed

_SHOWN_GONE = 8
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def amount(size: int) -> str:
    """Bytes with about three digits that count: ``812 B``, ``4.12 MB``, ``1.3 TB``."""
    value, unit = float(size), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    if unit == 0 or value >= 99.95:
        return f"{value:.0f} {_UNITS[unit]}"
    return f"{value:.1f} {_UNITS[unit]}" if value >= 9.995 else f"{value:.2f} {_UNITS[unit]}"


def checkpoints_text(
    listed: CheckpointsListed, *, now: float, reference: str, zone: tzinfo | None = None
) -> str:
    """A line per checkpoint on disk, then what is missing and what was left behind."""
    present = [each for each in listed.checkpoints if each.where != "gone"]
    gone = [each for each in listed.checkpoints if each.where == "gone"]
    total = sum(each.size for each in present)
    head = [t.clean(listed.run, 80), t.plural(len(present), "checkpoint")]
    head += [amount(total)] if present else []
    lines = ["   ".join([*head, t.clean(listed.path, 300)])]
    lines += _table(present, now, zone)
    lines += _missing(gone)
    lines += _left(listed)
    lines += _nothing_to_resume(listed, present, reference)
    return "\n".join(lines) + "\n"


def _table(present: Sequence[CheckpointLine], now: float, zone: tzinfo | None) -> Iterator[str]:
    rows = [_cells(each, now, zone) for each in present]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for each, row in zip(present, rows, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield f"  {'   '.join(cells)}   {'<- next' if each.next else ''}".rstrip()
        # The basis of its trust is shown where trust is less than full.
        if each.why and (each.where == "unreadable" or each.trust in ("suspect", "unknown")):
            yield f"      {t.clean(each.why, 300)}"


def _cells(each: CheckpointLine, now: float, zone: tzinfo | None) -> tuple[str, ...]:
    ranks = "" if each.world_size is None else t.plural(each.world_size, "rank")
    took = "" if each.save_s is None else f" in {t.span(each.save_s)}"
    when = "" if each.time is None else t.moment(each.time, now, zone)
    return (
        f"step {t.number(each.step)}",
        "unreadable" if each.where == "unreadable" else each.trust,
        when,
        f"{amount(each.size)}{took}",
        t.clean(each.reason, 60),
        f"attempt {each.attempt}",
        ranks,
        each.name,
    )


def _missing(gone: Sequence[CheckpointLine]) -> Iterator[str]:
    if gone:
        shown = ", ".join(t.number(each.step) for each in gone[:_SHOWN_GONE])
        more = len(gone) - _SHOWN_GONE
        rest = f" and {t.number(more)} more" if more > 0 else ""
        yield f"  missing on disk, though never deleted by the run: step {shown}{rest}"


def _left(listed: CheckpointsListed) -> Iterator[str]:
    for kind, words in (
        ("stage", "of saves in progress or interrupted"),
        ("trash", "of interrupted deletions"),
    ):
        leftovers = [each for each in listed.leftovers if each.kind == kind]
        if leftovers:
            size = amount(sum(each.size for each in leftovers))
            yield f"  {t.plural(len(leftovers), 'folder')} {words}: {size}"


def _nothing_to_resume(
    listed: CheckpointsListed, present: Sequence[CheckpointLine], reference: str
) -> Iterator[str]:
    usable = any(each.where == "disk" and each.trust != "suspect" for each in present)
    if present and not usable:
        yield (
            "  none of them can be resumed from.   to trust one after checking it: "
            f"slurm-forge checkpoints promote {reference} STEP --reason TEXT"
        )
