"""Bars of long commands: on a terminal only, and nothing of them is left."""

from __future__ import annotations

import io
import sys

import pytest

from slurm_forge.cli.progress import bar, counted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_only_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("verify", of_bytes=True) as shown:
        shown.reach(1, 2)
        shown.line("half of it")
        shown.reach(2, 2)
    assert capsys.readouterr() == ("", "half of it\n")


def test_on_a_terminal_the_bar_is_shown_and_taken_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with bar("ver[red]ify", of_bytes=True) as shown:
        shown.reach(3 << 20, 4 << 20)
        shown.line("[bold]half[/bold] of it")
    written = terminal.getvalue()
    assert "ver[red]ify" in written
    assert "3.0/4.0 MiB" in written
    assert "[bold]half[/bold] of it\n" in written
    assert written.endswith("\x1b[1A\x1b[2K")  # up, and the line is erased
    assert capsys.readouterr().out == ""


def test_a_check_is_counted_and_still_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError("fenced")

    with bar("deleting") as shown:
        reached: list[tuple[int, int]] = []
        monkeypatch.setattr(shown, "reach", lambda done, total: reached.append((done, total)))
        check = counted(shown, lambda: None, 2)
        for _ in range(4):
            check()
        assert reached == [(0, 2), (1, 2), (2, 2), (2, 2)]
        with pytest.raises(ValueError, match="fenced"):
            counted(shown, refuse, 2)()
