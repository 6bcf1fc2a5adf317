"""The README's terminal recording: real output of real commands, as an SVG.

The lines appear in the order and rhythm in which they were printed, long pauses shortened.  Colours
follow the reader's light or dark theme; viewers without animation show the whole screen.
"""

from __future__ import annotations

import argparse
import html
import os
import pty
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Line", "record", "svg"]

#: Prepares the folder; not shown.
_BEFORE = "slurm-forge init demo --yes --tasks-per-node 2"
_COMMANDS = ("slurm-forge run train.yaml --inject term@100:rank0,nan@200",)
_PICTURE = Path(__file__).resolve().parent.parent / "docs" / "assets" / "recording.svg"
_COLUMNS = 100
_FONT_PX, _ROW_PX, _MARGIN_PX = 13, 18, 16
_CHARACTER_PX = 0.602 * _FONT_PX
#: Between two lines that are shown, whatever was between them when they were printed.
_LEAST_S, _MOST_S, _AFTER_COMMAND_S = 0.04, 0.5, 0.4
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")
_TIME = re.compile(r"(\s*\d\d:\d\d:\d\d)(  .*)?$")
_MARKS = (
    ("dim", re.compile(r"injected faults: ")),
    ("bad", re.compile(r"preempt|SIGTERM|skipped|not finite|crash")),
    ("good", re.compile(r"\bfinished\b|\bsaved\b|nothing\.|nothing to do")),
)
_STYLE = """
:root{--back:#f6f8fa;--text:#1f2328;--dim:#6e7781;--bad:#9a3412;--good:#116329;--edge:#d0d7de}
@media(prefers-color-scheme:dark){:root{--back:#0d1117;--text:#e6edf3;--dim:#8b949e;--bad:#ffa657;\
--good:#7ee787;--edge:#30363d}}
rect{fill:var(--back);stroke:var(--edge)}
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;\
fill:var(--text);white-space:pre}
.command{font-weight:700}.dim{fill:var(--dim)}.bad{fill:var(--bad)}.good{fill:var(--good)}
@media(prefers-reduced-motion:no-preference){text{animation:show 1ms both}}
@keyframes show{from{opacity:0}to{opacity:1}}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the terminal: ``at`` is seconds since the beginning, ``command`` what was typed."""

    at: float
    text: str
    command: bool = False


def record(commands: Sequence[str], folder: Path) -> Iterator[Line]:
    """Run the commands in ``folder``, one after the other, in a terminal; yield what they print."""
    began = time.monotonic()
    for command in commands:
        yield Line(time.monotonic() - began, f"$ {command}", command=True)
        ours, theirs = pty.openpty()
        environ = {**os.environ, "COLUMNS": str(_COLUMNS), "TERM": "dumb", "NO_COLOR": "1"}
        with subprocess.Popen(
            command.split(), cwd=folder, env=environ, stdin=subprocess.DEVNULL,
            stdout=theirs, stderr=theirs,
        ) as process:  # fmt: skip
            os.close(theirs)
            for text in _lines_of(ours):
                yield Line(time.monotonic() - began, text)
        os.close(ours)
        if process.returncode:
            raise RuntimeError(f"{command}: exit status {process.returncode}")


def _lines_of(terminal: int) -> Iterator[str]:
    rest = b""
    while True:
        try:
            read = os.read(terminal, 4096)
        except OSError:  # EIO: the command has closed its side
            read = b""
        *lines, rest = (rest + read).split(b"\n")
        for line in [*lines, rest] if not read and rest else lines:
            yield _CONTROL.sub("", line.decode(errors="replace"))
        if not read:
            return


def svg(lines: Sequence[Line]) -> str:
    """The picture."""
    rows = [(at, row, line) for at, line in _shown_at(lines) for row in _wrapped(line.text)]
    width = round(_COLUMNS * _CHARACTER_PX) + 2 * _MARGIN_PX
    height = len(rows) * _ROW_PX + 2 * _MARGIN_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        "<!-- Made by scripts/recording. -->",
        f"<style>{_STYLE}</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>',
    ]
    for number, (at, row, line) in enumerate(rows):
        y = _MARGIN_PX + number * _ROW_PX + _FONT_PX
        if row.strip():
            parts.append(
                f'<text x="{_MARGIN_PX}" y="{y}" xml:space="preserve" '
                f'style="animation-delay:{at:.2f}s">{_coloured(row, line)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _shown_at(lines: Sequence[Line]) -> Iterator[tuple[float, Line]]:
    at = before = 0.0
    for number, line in enumerate(lines):
        if number:
            after_command = lines[number - 1].command
            least = _AFTER_COMMAND_S if after_command else _LEAST_S
            at += min(max(line.at - before, least), _MOST_S)
        before = line.at
        yield at, line


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    rows = textwrap.wrap(
        text, _COLUMNS, subsequent_indent=indent, drop_whitespace=True, replace_whitespace=False,
        break_on_hyphens=False, initial_indent="",
    )  # fmt: skip
    return rows or [""]


def _coloured(row: str, line: Line) -> str:
    if line.command:
        return f'<tspan class="command">{html.escape(row, quote=False)}</tspan>'
    stamp = _TIME.match(row)
    begin, rest = (stamp[1], stamp[2] or "") if stamp else ("", row)
    kind = next((name for name, pattern in _MARKS if pattern.search(line.text)), "")
    text = html.escape(rest, quote=False)
    return (f'<tspan class="dim">{begin}</tspan>' if begin else "") + (
        f'<tspan class="{kind}">{text}</tspan>' if kind else text
    )


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(prog="scripts/recording", description=__doc__)
    parser.add_argument("--to", type=Path, default=_PICTURE, help="where the SVG is written")
    to = parser.parse_args().to
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(_BEFORE.split(), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        lines = list(record(_COMMANDS, Path(folder) / "demo"))
    to.write_text(svg(lines), encoding="utf-8")
    print(f"{to}: {len(lines)} lines, {to.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
