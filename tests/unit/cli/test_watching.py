"""Lines for pipes, a bar for terminals."""

from __future__ import annotations

import io
from pathlib import Path

from slurm_forge.cli.observe.follow import (
    PlainScreen,
    RunFollower,
    screen_for,
)
from slurm_forge.cli.observe.run_reading import RunReader
from slurm_forge.journal import events as ev
from tests.unit.report.journals import Scribe


class Terminal(io.StringIO):
    """What a person would see, with everything that moves the cursor."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_step_is_told_now_and_then() -> None:
    now = [0.0]
    lines: list[str] = []
    screen = PlainScreen(lines.append, clock=lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        screen.step(second * 10, 2000)
    assert lines == ["step 300 of 2000", "step 600 of 2000", "step 900 of 2000"]


def test_a_terminal_gets_a_bar_and_the_lines_as_they_are(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    terminal = Terminal()
    gathering = RunReader(scribe.run)
    with screen_for(terminal) as screen:
        watcher = RunFollower(gathering, screen)
        scribe.begin()
        scribe.resume(0)
        scribe.train(1, 100)
        scribe.write("supervisor", ev.Note(text="[red]not markup[/red]"))
        watcher.poll()
    assert "[red]not markup[/red]" in terminal.getvalue()
    assert "100/400" in terminal.getvalue()


def test_a_step_further_back_is_shown_after_a_rollback(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    seen: list[int] = []

    class Steps:
        def line(self, text: str) -> None: ...

        def step(self, step: int, total: int | None = None) -> None:
            seen.append(step)

    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 9)
    scribe.relaunch()
    scribe.resume(5)
    RunFollower(RunReader(scribe.run), Steps()).poll()
    assert seen == [0, 9, 5]


def test_epochs_that_follow_each_other_fast_have_few_lines(tmp_path: Path) -> None:
    scribe, lines = Scribe(tmp_path), list[str]()
    scribe.begin()
    scribe.resume(0)
    for epoch in range(60):
        scribe.later(1).write(
            "rank0", ev.EpochEnded(epoch=epoch, step=epoch, samples=8, skipped_steps=0)
        )
    RunFollower(RunReader(scribe.run), PlainScreen(lines.append)).poll()
    told = [line.split()[2] for line in lines if "epoch" in line]
    assert told == ["0", "10", "20", "30", "40", "50"]
