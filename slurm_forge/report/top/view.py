"""The lines of ``top``: rows become text of a given width, with a tone for each piece.

Nothing here knows the terminal.  No line depends on colour: what needs a person has a ``!``, the
chosen run a ``>``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from enum import Enum
from textwrap import wrap

from rich.cells import set_cell_size

from slurm_forge.report import text as t
from slurm_forge.report.story.pace_story import PaceBuilder, slow_line
from slurm_forge.report.top.rows import TopRow
from slurm_forge.report.top.sparkline import sparkline

_WIDTHS = (10, 13, 7, 7, 8, 5, 8)
_HEADS = ("STATE", "STEP", "/STEP", "LOSS", "TREND", "GOOD", "LIMIT")
_LONGEST_NAME = 40
_WORDS_LINES = 3
_LONGEST_NEXT = 400
#: What our own texts are written with beside ASCII.
_IN_ASCII = {"\N{HORIZONTAL ELLIPSIS}": "...", "\N{RIGHTWARDS ARROW}": "->", "\N{MIDDLE DOT}": "-"}


class Tone(str, Enum):
    """How a piece of text is meant; a terminal without colours shows all of them the same."""

    PLAIN = "plain"
    HEAD = "head"
    DIM = "dim"
    GOOD = "good"
    BAD = "bad"
    CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class ViewLine:
    """One line, in one tone."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True)
class View:
    """What the terminal is like: characters per line, whether it has only ASCII, its time zone."""

    width: int
    ascii_only: bool = False
    zone: tzinfo | None = None

    def line(self, text: str, tone: Tone = Tone.PLAIN) -> ViewLine:
        """A line that fills the width, whatever is in the text."""
        shown = t.paragraph(text.replace("\n", " "))
        if self.ascii_only:
            shown = "".join(_IN_ASCII.get(c, c if c.isascii() else "?") for c in shown)
        return ViewLine(set_cell_size(shown, self.width), tone)

    def head(
        self, where: str, rows: Sequence[TopRow], *, now: float, slurm: str, loading: int
    ) -> ViewLine:
        """How many runs there are, by state, and when that was."""
        counts = Counter(row.state for row in rows)
        order = sorted(counts, key=lambda state: min(r.order for r in rows if r.state == state))
        states = ", ".join(f"{counts[state]} {state}" for state in order)
        more = f", {loading} being read" if loading else ""
        # Last what may be cut off in a narrow terminal: who started it knows the folder.
        parts = (t.clock(now, self.zone), f"{states or 'no runs'}{more}", slurm, where)
        return self.line("  ".join(filter(None, parts)), Tone.HEAD)

    def wrapped(self, text: str) -> list[ViewLine]:
        """A line of a longer text; what doesn't fit continues below, indented."""
        indent = min(len(text) - len(text.lstrip()) + 4, self.width // 2)
        pieces = wrap(text, max(1, self.width), subsequent_indent=" " * indent)
        return [self.line(piece) for piece in pieces or [""]]

    def table_head(self) -> ViewLine:
        """The names of the columns."""
        return self.line(self._columns("  RUN", _HEADS), Tone.HEAD)

    def row(self, row: TopRow, *, now: float, chosen: bool) -> ViewLine:
        """A run in one line."""
        mark = (">" if chosen else " ") + ("!" if row.attention else " ")
        cells = (
            row.state,
            _step(row),
            "" if row.step_s is None else t.span(row.step_s).replace(" ", ""),
            "" if row.loss is None else _figure(row.loss, _WIDTHS[3]),
            sparkline(row.losses, _WIDTHS[4], ascii_only=self.ascii_only) if row.is_live else "",
            "" if row.goodput is None else f"{100 * row.goodput:.0f} %",
            "" if row.limit is None else t.span(row.limit - now),
        )
        tone = Tone.CHOSEN if chosen else _tone(row)
        return self.line(self._columns(mark + t.clean(row.name), cells), tone)

    def detail(self, row: TopRow, *, now: float, height: int) -> list[ViewLine]:
        """A run in ``height`` lines: what it does first, the last events at the end."""
        lines = list(self._facts(row, now))[:height]
        events = row.happened[len(row.happened) - max(0, height - len(lines)) :]
        lines += [self.line(f"  {event}", Tone.DIM) for event in events]
        return lines + [self.line("")] * (height - len(lines))

    def _columns(self, first: str, cells: Sequence[str]) -> str:
        shown = [set_cell_size(cell, width) for cell, width in zip(cells, _WIDTHS, strict=True)]
        rest = " ".join(shown)
        width = min(max(10, self.width - len(rest) - 1), _LONGEST_NAME)
        return f"{set_cell_size(first, width)} {rest}"

    def _facts(self, row: TopRow, now: float) -> Iterator[ViewLine]:
        words = row.words if row.words.startswith(row.state) else f"{row.state}: {row.words}"
        tone = Tone.BAD if row.attention else Tone.PLAIN
        # Why it is held is worth more than one line.
        told = wrap(t.clean(f"{row.name}  {words}"), max(10, self.width), max_lines=_WORDS_LINES)
        yield from (self.line(each, tone) for each in told)
        if row.attention:
            yield from self._next(row)
        place = [] if row.attempt is None else [f"attempt {row.attempt}"]
        place += [] if row.launch is None else [f"launch {row.launch}"]
        place += [f"job {row.job}"] if row.job else []
        place += [t.plural(row.world_size, "rank")] if row.world_size else []
        if place:
            yield self.line(", ".join(place))
        yield from self._nodes(row)
        progress = _fitting(_progress(row), self.width)
        if progress:
            yield self.line(progress)
        if row.losses:
            width = max(1, self.width - len(row.loss_name) - 12)
            line = sparkline(row.losses, width, ascii_only=self.ascii_only)
            yield self.line(f"{row.loss_name} {row.losses[-1]:.4g} {line}")
        timing = _fitting(_timing(row, now), self.width)
        if timing:
            yield self.line(timing)
        yield from (self.line(text, Tone.DIM) for text in row.warnings[:2])
        if not row.attention:
            yield from self._next(row)

    def _next(self, row: TopRow) -> Iterator[ViewLine]:
        """What a person can do, in whole lines: commands must not be cut."""
        for each in row.next[:2]:
            text, width = t.clean(f"next: {each}", _LONGEST_NEXT), max(10, self.width)
            told = wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
            yield from (self.line(line, Tone.DIM) for line in told)

    def _nodes(self, row: TopRow) -> Iterator[ViewLine]:
        """The nodes; those that are slow by themselves, with their ranks, the slowest first."""
        if row.nodes:
            yield self.line(f"nodes {t.some_nodes(row.nodes)}")
        for each in row.slow[:3]:
            builder = PaceBuilder()
            builder.add(each, 0.0)
            yield self.line(f"! {slow_line(builder.slow[0], self.zone)}", Tone.BAD)


def _tone(row: TopRow) -> Tone:
    if row.attention:
        return Tone.BAD
    if row.state == "running":
        return Tone.GOOD
    return Tone.PLAIN if row.is_live else Tone.DIM


def _figure(value: float, width: int) -> str:
    """With as many digits as fit: what is cut off would change its value."""
    texts = (f"{value:.4g}", f"{value:.3g}", f"{value:.1e}", f"{value:.0e}")
    return next((text for text in texts if len(text) <= width), texts[-1])


def _step(row: TopRow) -> str:
    if row.step is None:
        return ""
    share = ""
    if row.total_steps and row.step <= row.total_steps:
        share = f" {100 * row.step // row.total_steps}%"
    return f"{row.step}{share}"


def _fitting(parts: Sequence[str], width: int) -> str:
    """As many parts as fit: one that is cut off would have another value."""
    shown = ""
    for part in parts:
        longer = f"{shown}, {part}" if shown else part
        if shown and len(longer) > width:
            break
        shown = longer
    return shown


def _progress(row: TopRow) -> list[str]:
    parts = []
    if row.step is not None:
        of = f" of {row.total_steps}" if row.total_steps else ""
        parts.append(f"step {row.step}{of}")
    if row.step_s is not None:
        parts.append(f"{t.span(row.step_s)} per step")
        if row.total_steps and row.step is not None and row.step < row.total_steps:
            left = (row.total_steps - row.step) * row.step_s
            parts.append(f"{t.span(left)} to go")
    if row.goodput is not None:
        parts.append(f"goodput {t.share(row.goodput)}")
    shown = [f"{name} {value:.4g}" for name, value in row.figures if name != row.loss_name]
    return [*parts, *shown[:3]]


def _timing(row: TopRow, now: float) -> list[str]:
    parts = []
    if row.limit is not None:
        left = row.limit - now
        parts.append(f"time limit in {t.span(left)}" if left > 0 else "time limit reached")
    if row.saved is not None:
        parts.append(f"saved step {row.saved.step} ({t.ago(row.saved.time, now)})")
    if row.next_save is not None:
        due = row.next_save - now
        parts.append(f"next save in about {t.span(due)}" if due > 0 else "next save is due")
    if row.probe_off:
        parts.append("probe off")
    elif row.probe is not None:
        latency = "" if row.probe.latency_s is None else f" {t.span(row.probe.latency_s)}"
        parts.append(f"probe{latency}" if row.probe.ok else "probe FAILED")
    return parts


def window(count: int, chosen: int, height: int, first: int) -> int:
    """The first row that is shown, so that the chosen one is among them and little moves."""
    if height <= 0:
        return 0
    first = min(max(first, chosen - height + 1), chosen)
    return max(0, min(first, max(0, count - height)))


def sorted_rows(rows: Iterable[TopRow], *, finished: bool) -> list[TopRow]:
    """Runs that need a person first; finished ones only where they are wanted."""
    chosen = (row for row in rows if finished or row.state != "finished")
    return sorted(chosen, key=lambda row: row.order)
