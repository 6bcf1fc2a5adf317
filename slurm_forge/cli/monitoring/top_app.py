"""The terminal application of ``top``: keys, and lines of which only those that change are sent.

No colour is needed to read it, no animation runs, and all colours are the terminal's own sixteen.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from slurm_forge.cli.monitoring.top_reading import Fleet
from slurm_forge.report.text import printed
from slurm_forge.report.top.rows import TopRow
from slurm_forge.report.top.view import Tone, View, ViewLine, sorted_rows, window

_STYLES = {
    Tone.PLAIN: Style(),
    Tone.HEAD: Style(bold=True),
    Tone.DIM: Style(dim=True),
    Tone.GOOD: Style(color="green"),
    Tone.BAD: Style(color="red", bold=True),
    Tone.CHOSEN: Style(reverse=True),
}
_KEYS = "s save  S stop  r requeue  u release  e explain  l log  p report  f done  q quit"
_KEYS_OF_TEXT = "arrows, page up/down: scroll   q: back"
#: Lines of the details of the chosen run, below the list.
_DETAIL = 11
_MOST_DETAIL = 24
#: Of the time that has passed, what reading may take.
_SHARE = 20.0
_MOST_TEXT = 5000


class Verb(str, Enum):
    """What can be asked of the chosen run; the values are verbs, but for a release."""

    SAVE = "save"
    STOP = "stop"
    REQUEUE = "requeue"
    RELEASE = "release"
    EXPLAIN = "explain"
    LOGS = "logs"
    REPORT = "report"


#: Verbs that need a confirmation, and what they will do.
_CONFIRMED = {
    Verb.STOP: "it saves, stops and stays stopped until it is requeued",
    Verb.REQUEUE: "it continues, or is submitted again",
    Verb.RELEASE: "its held job may start",
}
_SHOWN_AS_TEXT = frozenset({Verb.EXPLAIN, Verb.LOGS})


@dataclass(frozen=True, slots=True)
class VerbResult:
    """The outcome of a verb: whether it worked, and what it printed."""

    worked: bool
    text: str


#: Carries out a verb on a run.
Command = Callable[[Verb, TopRow], Awaitable[VerbResult]]


class Lines(Widget):
    """Lines of text; of new ones only those that differ are drawn."""

    DEFAULT_CSS = "Lines { background: ansi_default; color: ansi_default; }"

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self.lines: list[ViewLine] = []

    def show(self, lines: Sequence[ViewLine]) -> None:
        """Replace the lines."""
        before, self.lines = self.lines, list(lines)
        count = max(len(before), len(self.lines))
        changed = [
            Region(0, y, self.size.width, 1)
            for y in range(count)
            if before[y : y + 1] != self.lines[y : y + 1]
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """See Textual."""
        line = self.lines[y] if y < len(self.lines) else ViewLine("")
        strip = Strip([Segment(line.text, _STYLES[line.tone])])
        return strip.adjust_cell_length(self.size.width)


class TextScreen(Screen[None]):
    """A long text to scroll in."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "app.pop_screen"),
        Binding("down,j", "scroll(1)"),
        Binding("up,k", "scroll(-1)"),
        Binding("pagedown,space", "page(1)"),
        Binding("pageup", "page(-1)"),
        Binding("home,g", "scroll(-1000000)"),
        Binding("end,G", "scroll(1000000)"),
    ]
    CSS = """
    TextScreen { background: ansi_default; overflow: hidden; }
    #text { height: 1fr; }
    #below { height: 1; }
    """

    def __init__(self, view: Callable[[], View], text: str, *, at_end: bool) -> None:
        super().__init__()
        self._view = view
        self._texts = [printed(line) for line in text.splitlines()[-_MOST_TEXT:]]
        self._lines: list[ViewLine] = []
        self._width = 0
        self._first = sys.maxsize if at_end else 0

    def compose(self) -> ComposeResult:
        """See Textual."""
        yield Lines("text")
        yield Lines("below")

    def on_resize(self, event: events.Resize) -> None:
        """Draw it in the new size."""
        self.call_after_refresh(self.action_scroll, 0)

    def action_scroll(self, lines: int) -> None:
        """Move by so many lines."""
        text, view = self.query_one("#text", Lines), self._view()
        height = max(1, text.size.height)
        if self._width != view.width:
            self._width = view.width
            self._lines = [line for each in self._texts for line in view.wrapped(each)]
        self._first = max(0, min(self._first + lines, len(self._lines) - height))
        text.show(self._lines[self._first : self._first + height])
        self.query_one("#below", Lines).show([view.line(_KEYS_OF_TEXT, Tone.HEAD)])

    def action_page(self, pages: int) -> None:
        """Move by as much as is shown."""
        self.action_scroll(pages * max(1, self.query_one("#text", Lines).size.height - 1))


class TopApp(App[None]):
    """Many runs, or one of them.

    Args:
        fleet: The runs.
        where: What they are, as a person would name it.
        command: Carries out what keys ask for.
        one: Whether it is a single run, which then fills the terminal.
        ascii_only: Whether the terminal can't show anything else.
        every_s: The time between two looks at least.
        clock: Seconds since the epoch.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit"),
        Binding("down,j", "move(1)"),
        Binding("up,k", "move(-1)"),
        Binding("pagedown", "move(10)"),
        Binding("pageup", "move(-10)"),
        Binding("home,g", "move(-1000000)"),
        Binding("end,G", "move(1000000)"),
        Binding("f", "finished"),
        Binding("s", "ask('save')"),
        Binding("S", "ask('stop')"),
        Binding("r", "ask('requeue')"),
        Binding("u", "ask('release')"),
        Binding("e,enter", "ask('explain')"),
        Binding("l", "ask('logs')"),
        Binding("p", "ask('report')"),
        Binding("y", "confirm", priority=True),
        Binding("n,escape", "refuse"),
    ]
    CSS = """
    Screen { background: ansi_default; overflow: hidden; }
    #head, #message, #keys { height: 1; }
    #list { height: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        fleet: Fleet,
        where: str,
        command: Command,
        *,
        one: bool = False,
        ascii_only: bool = False,
        every_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"
        self._fleet = fleet
        self._looking = asyncio.Lock()
        self._where = where
        self._command = command
        self._one = one
        self._ascii = ascii_only
        self._every_s = every_s
        self._clock = clock
        self._rows: list[TopRow] = []
        self._chosen = ""
        self._first = 0
        self._finished = True
        self._asked: tuple[Verb, TopRow] | None = None
        self._message = ""

    def compose(self) -> ComposeResult:
        """See Textual."""
        for name in ("head", "list", "detail", "message", "keys"):
            yield Lines(name)

    def on_mount(self) -> None:
        """Begin to read."""
        self.run_worker(self._keep_looking(), exclusive=True, group="looking")

    def on_resize(self, event: events.Resize) -> None:
        """Draw it in the new size."""
        self.call_after_refresh(self._show)

    async def look(self) -> float:
        """Read what has changed and show it; the seconds of a core that reading took."""
        async with self._looking:
            spent = await asyncio.to_thread(self._read)
        self._rows = sorted_rows(self._fleet.rows(), finished=self._finished or self._one)
        self._show()
        return spent

    async def _keep_looking(self) -> None:
        while True:
            spent = await self.look()
            pause = self._every_s if not self._fleet.loading else 0.1
            await asyncio.sleep(pause if self._fleet.loading else max(pause, _SHARE * spent))

    def _read(self) -> float:
        began = time.thread_time()
        self._fleet.poll()
        self._fleet.ask_slurm()
        for row in self._studied():
            self._fleet.study(row.path)
        return time.thread_time() - began

    def _studied(self) -> list[TopRow]:
        """The chosen run, and one of the others that are seen: their turn comes."""
        chosen = [row for row in self._rows if row.path == self._chosen]
        seen = [row for row in self._rows[self._first : self._first + 40] if row.is_live]
        return [*chosen, *(row for row in seen if row.goodput is None)][:2]

    # -- showing ----------------------------------------------------------------------------------

    def _view(self) -> View:
        return View(self.size.width, self._ascii)

    def _index(self) -> int:
        paths = [row.path for row in self._rows]
        return paths.index(self._chosen) if self._chosen in paths else 0

    def _show(self) -> None:
        if not self.screen_stack or isinstance(self.screen, TextScreen):
            return
        view, now, index = self._view(), self._clock(), self._index()
        if self._rows:
            self._chosen = self._rows[index].path
        detail = self._detail_height()
        self.query_one("#detail").styles.height = detail
        self.query_one("#list").display = not self._one
        height = max(0, self.size.height - 3 - detail)
        self._first = window(len(self._rows), index, height - 1, self._first)
        shown = self._rows[self._first : self._first + max(0, height - 1)]
        table = [view.table_head()] if height else []
        table += [view.row(each, now=now, chosen=each.path == self._chosen) for each in shown]
        head = view.head(
            self._where,
            self._rows,
            now=now,
            slurm=self._fleet.trouble,
            loading=self._fleet.loading,
        )
        self.query_one("#head", Lines).show([head])
        self.query_one("#list", Lines).show(table)
        row = self._rows[index] if self._rows else None
        lines = [] if row is None else view.detail(row, now=now, height=detail)
        self.query_one("#detail", Lines).show(lines)
        self.query_one("#message", Lines).show([self._message_line(view)])
        self.query_one("#keys", Lines).show([view.line(_KEYS, Tone.DIM)])

    def _detail_height(self) -> int:
        if self._one:
            return max(0, self.size.height - 3)
        return min(_MOST_DETAIL, max(0, self.size.height // 2 - 1, _DETAIL))

    def _message_line(self, view: View) -> ViewLine:
        if self._asked is not None:
            verb, row = self._asked
            return view.line(f"{verb.value} {row.name}? {_CONFIRMED[verb]}.  y / n", Tone.CHOSEN)
        return view.line(self._message, Tone.HEAD)

    # -- keys -------------------------------------------------------------------------------------

    def action_move(self, lines: int) -> None:
        """Choose another run."""
        if self._rows and self._asked is None:
            index = max(0, min(len(self._rows) - 1, self._index() + lines))
            self._chosen = self._rows[index].path
            self._show()

    def action_finished(self) -> None:
        """Hide finished runs, or show them again."""
        self._finished = not self._finished
        self._rows = sorted_rows(self._fleet.rows(), finished=self._finished or self._one)
        self._show()

    def action_ask(self, name: str) -> None:
        """Ask something of the chosen run, at once or once it is confirmed."""
        if not self._rows or self._asked is not None:
            return
        verb, row = Verb(name), self._rows[self._index()]
        if verb in _CONFIRMED:
            self._asked = (verb, row)
            self._show()
        else:
            self._carry_out(verb, row)

    def action_confirm(self) -> None:
        """Do what was asked."""
        if self._asked is not None:
            (verb, row), self._asked = self._asked, None
            self._carry_out(verb, row)

    def action_refuse(self) -> None:
        """Don't."""
        if self._asked is not None:
            self._message = f"{self._asked[0].value}: not done"
            self._asked = None
            self._show()

    def _carry_out(self, verb: Verb, row: TopRow) -> None:
        self._message = f"{verb.value} {row.name} ..."
        self._show()
        self.run_worker(self._done(verb, row), group="verbs", exit_on_error=False)

    async def _done(self, verb: Verb, row: TopRow) -> None:
        answer = await self._command(verb, row)
        self._fleet.forget(row.path)
        if answer.worked and verb in _SHOWN_AS_TEXT:
            self._message = ""
            at_end = verb is Verb.LOGS
            await self.push_screen(TextScreen(self._view, answer.text, at_end=at_end))
            return
        told = " ".join(answer.text.split())
        self._message = told or f"{verb.value}: {'done' if answer.worked else 'failed'}"
        self._show()
