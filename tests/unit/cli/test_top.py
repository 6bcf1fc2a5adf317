"""``top`` in a terminal of 80 x 24: what it shows, what its keys do, and how little it reads."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path

import pytest

pytest.importorskip("textual")

from slurm_forge.cli.monitoring import top as verb
from slurm_forge.cli.monitoring.top_app import Lines, TextScreen, TopApp, Verb, VerbResult
from slurm_forge.cli.monitoring.top_reading import Fleet
from slurm_forge.cli.observe.run_reading import RunReader, gather
from slurm_forge.cli.run_choice import run_names
from slurm_forge.errors import SlurmCommandError
from slurm_forge.journal import compact_journal
from slurm_forge.journal import events as ev
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.top.rows import TopRow
from slurm_forge.report.top.view import View
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.records import QueueRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.cli.conftest import Shell
from tests.unit.report.journals import Scribe


@dataclass
class Queue:
    """A Slurm that has a queue and nothing else."""

    lines: tuple[QueueRecord, ...] = ()
    error: SlurmCommandError | None = None
    asked: list[str] = field(default_factory=list)

    def queue(self, user: str) -> tuple[QueueRecord, ...]:
        self.asked.append(user)
        if self.error is not None:
            raise self.error
        return self.lines


@dataclass
class Ticks:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def state(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")


def training(folder: Path, name: str = "tiny-gpt", *, job: str = "8812301") -> Scribe:
    scribe = Scribe(folder / "runs", name)
    scribe.now = time.time() - 200
    scribe.begin("n01", "n02", job=job)
    scribe.resume(0)
    for step in range(1, 11):
        scribe.later(5).write(
            "rank0", ev.Logged(step=step, values={"lr": 1e-3, "loss": 4 - step / 5})
        )
    scribe.save(10)
    return scribe


def held(folder: Path, name: str = "bad") -> Scribe:
    scribe = Scribe(folder / "runs", name)
    scribe.now = time.time() - 500
    scribe.begin(job="77")
    scribe.incident(Cause.APP_ERROR, Action.HOLD)
    scribe.held("app_error: nothing left to try", job="77")
    return scribe


def finished(folder: Path, name: str = "done") -> Scribe:
    scribe = Scribe(folder / "runs", name)
    scribe.now = time.time() - 900
    scribe.begin(job="78")
    scribe.resume(0)
    scribe.train(1, 3)
    scribe.finish(3)
    scribe.run.mark_done(3, 1)
    return scribe


def fleet_of(folder: Path, slurm: Queue | None = None, ticks: Ticks | None = None) -> Fleet:
    runs = folder / "runs"

    def names() -> list[RunDirectory]:
        return [RunDirectory.at(runs / name) for name in run_names(runs)]

    return Fleet(names, runs, slurm, ticks=ticks or Ticks())  # type: ignore[arg-type]


def by_name(fleet: Fleet) -> dict[str, TopRow]:
    return {row.name: row for row in fleet.rows()}


async def nothing(verb: Verb, row: TopRow) -> VerbResult:
    raise AssertionError(f"{verb} was carried out")


def driven(
    fleet: Fleet,
    steps: Callable[[TopApp, Callable[..., Awaitable[None]]], Awaitable[None]],
    *,
    command: Callable[[Verb, TopRow], Awaitable[VerbResult]] = nothing,
    ascii_only: bool = False,
    one: bool = False,
) -> None:
    """Textual's Pilot at 80 x 24; looks happen only when a test asks for them."""

    async def main() -> None:
        app = TopApp(fleet, "runs", command, every_s=1e6, ascii_only=ascii_only, one=one)
        async with app.run_test(size=(80, 24)) as pilot:
            await app.look()

            async def press(*keys: str) -> None:
                await pilot.press(*keys)
                verbs = [worker for worker in app.workers if worker.group == "verbs"]
                if verbs:
                    await app.workers.wait_for_complete(verbs)
                await pilot.pause()

            await pilot.pause()
            await steps(app, press)

    asyncio.run(main())


def shown(app: TopApp, *names: str) -> list[str]:
    widgets = [app.screen.query_one(f"#{name}", Lines) for name in names]
    return [line.text for widget in widgets for line in widget.lines]


def test_the_screen_of_many_runs(shell: Shell) -> None:
    scribe = training(shell.folder)
    scribe.write(
        "supervisor",
        ev.StragglerSeen(
            step=9, since_step=5, ranks=(5,), host="n02", factor=1.4, trial=1.3, why="node"
        ),
    )
    held(shell.folder)
    finished(shell.folder)

    async def steps(app: TopApp, press: Callable[..., Awaitable[None]]) -> None:
        lines = shown(app, "head", "list", "detail", "message", "keys")
        assert app.screen.query_one("#keys").region.bottom == 24
        assert app.screen.query_one("#list").size.height == len(shown(app, "list")) + 6
        assert {len(line) for line in lines} == {80}
        assert lines[-1].endswith(" q quit"), "every key fits"
        table = shown(app, "list")
        assert [line[:16].split() for line in table[1:]] == [[">!bad"], ["!tiny-gpt"], ["done"]]
        assert re.search(r"running +10 2% +5\.0s +2 +█▇▆▅▄▃▂▁", table[2])
        await press("down")
        await app.look()
        detail = "\n".join(shown(app, "detail"))
        assert "step 10 of 400, 5.0 s per step, 32 min to go, goodput " in detail
        assert "nodes n[01-02]\n" in re.sub(" +\n", "\n", detail)
        assert "! slow: n02" in detail
        assert "saved step 10 in 0.3 s" in detail
        await press("f")
        assert not any("done" in line for line in shown(app, "list"))

    driven(fleet_of(shell.folder), steps)


def test_how_far_an_ended_launch_came_is_what_explain_says(shell: Shell) -> None:
    scribe = training(shell.folder)
    scribe.write("supervisor", ev.LaunchEnded(outcome="hang", step=13))
    scribe.incident(Cause.HANG, Action.HOLD, step=13)
    scribe.held("hang")
    fleet = fleet_of(shell.folder)
    fleet.poll()
    assert by_name(fleet)["tiny-gpt"].step == explain(scribe.facts()).step == 13


def test_a_run_that_is_not_heard_of_is_to_be_looked_into(shell: Shell) -> None:
    scribe = training(shell.folder).later(3600)
    fleet = Fleet(lambda: [scribe.run], shell.folder, None, clock=lambda: scribe.now)
    fleet.poll()
    (row,) = fleet.rows()
    assert row.state == "quiet" and row.attention
    assert row.next[0] == f"see what Slurm says of its job: slurm-forge status {row.path}"


def test_one_run_in_a_terminal_without_utf_8(shell: Shell) -> None:
    training(shell.folder)

    async def steps(app: TopApp, press: Callable[..., Awaitable[None]]) -> None:
        lines = shown(app, "head", "list", "detail", "message", "keys")
        assert all(line.isascii() for line in lines)
        assert any("loss 2 ^^==--..__" in line for line in lines)
        assert app.screen.query_one("#keys").region.bottom == 24
        assert app.screen.query_one("#detail").size.height == len(shown(app, "detail")) == 21

    driven(fleet_of(shell.folder), steps, ascii_only=True, one=True)


def test_stopping_needs_to_be_confirmed(shell: Shell) -> None:
    run = training(shell.folder).run

    async def steps(app: TopApp, press: Callable[..., Awaitable[None]]) -> None:
        await press("S")
        assert "stop tiny-gpt? it saves, stops" in shown(app, "message")[0]
        await press("n")
        assert "stop: not done" in shown(app, "message")[0]
        await press("y")
        assert not run.stop_file.exists()
        await press("S", "y")
        assert run.stop_file.exists()
        assert "tiny-gpt: asked to save and stop" in shown(app, "message")[0]
        await press("s")
        assert run.save_file.exists()

    driven(fleet_of(shell.folder), steps, command=verb.carry_out)


def test_texts_and_verbs_that_are_not_there(shell: Shell) -> None:
    scribe = training(shell.folder)
    (scribe.run.submissions / "tiny-gpt-8812301.out").write_text("hello\x1b[2J\n" * 50)

    async def command(verb: Verb, row: TopRow) -> VerbResult:
        assert row.name == "tiny-gpt"
        if verb is Verb.REPORT:
            return VerbResult(False, "Error: No such command 'report'.\n")
        long = "  evidence " + "word " * 40 + "at its end\n"
        return VerbResult(True, f"of {verb.value}\n{long}" + "line\x1b[2J\n" * 50 + "the end")

    async def steps(app: TopApp, press: Callable[..., Awaitable[None]]) -> None:
        await press("p")
        assert "No such command 'report'." in shown(app, "message")[0]
        await press("e")
        assert isinstance(app.screen, TextScreen)
        assert shown(app, "text")[0].startswith("of explain")
        assert not any("\x1b" in line for line in shown(app, "text"))
        assert any(line.rstrip().endswith("at its end") for line in shown(app, "text"))
        await press("end")
        assert shown(app, "text")[-1].startswith("the end")
        await press("q", "l")
        assert shown(app, "text")[-1].startswith("the end")
        await press("q")
        assert not isinstance(app.screen, TextScreen)

    driven(fleet_of(shell.folder), steps, command=command)


def test_slurm_is_asked_once_in_15_seconds_for_all_runs(shell: Shell) -> None:
    for number in range(5):
        training(shell.folder, f"run-{number}", job=str(900 + number))
    slurm, ticks = Queue(), Ticks()
    fleet = fleet_of(shell.folder, slurm, ticks)
    for second in range(31):
        ticks.now = float(second)
        fleet.poll()
        fleet.ask_slurm()
    assert len(slurm.asked) == 3
    slurm.error = SlurmCommandError(("squeue",), 1, "no answer")
    ticks.now = 50.0
    fleet.ask_slurm()
    assert fleet.trouble == "Slurm's queue does not answer"
    assert {row.state for row in fleet.rows()} == {"running"}


def test_slurm_is_not_asked_for_runs_at_rest_or_without_it(shell: Shell) -> None:
    held(shell.folder)
    finished(shell.folder)
    training(shell.folder, "local", job="local-12")
    slurm = Queue()
    fleet = fleet_of(shell.folder, slurm)
    fleet.poll()
    assert not fleet.ask_slurm()
    assert slurm.asked == []


def test_what_slurm_says_of_a_job(shell: Shell) -> None:
    training(shell.folder, "gone", job="901")
    training(shell.folder, "runs", job="902")
    waiting = ("waits", "903"), ("starts", "904"), ("task", "905_7"), ("cut", "906_99")
    for name, job in waiting:
        scribe = Scribe(shell.folder / "runs", name)
        scribe.now = time.time() - 100
        scribe.submitted(job)
    queue = tuple(
        QueueRecord(job_ref=job, job_id=int(job[:3]), state=state, reason="Priority")
        for job, state in (
            ("902", JobState.RUNNING),
            ("903", JobState.PENDING),
            ("904", JobState.RUNNING),
            ("905_[3,6-9%2]", JobState.PENDING),
            ("906_[1-3,5...]", JobState.PENDING),
        )
    )
    fleet = fleet_of(shell.folder, Queue(queue))
    fleet.poll()
    fleet.ask_slurm()
    rows = by_name(fleet)
    assert {name: row.state for name, row in rows.items()} == {
        "gone": "gone",
        "runs": "running",
        "waits": "waiting",
        "task": "waiting",
        "cut": "waiting",
        "starts": "starting",
    }
    assert rows["gone"].attention
    assert rows["waits"].words == "waiting in the queue: Priority"


def test_only_what_has_changed_is_read(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    scribe = training(shell.folder)
    other = training(shell.folder, "other")
    finished(shell.folder)
    ticks = Ticks()
    fleet = fleet_of(shell.folder, None, ticks)
    fleet.poll()
    fleet.poll()
    polled: list[str] = []
    poll = RunReader.poll

    def counted(self: RunReader) -> list[object]:
        polled.append(self._run.name)
        return poll(self)  # type: ignore[return-value]

    monkeypatch.setattr(RunReader, "poll", counted)
    fleet.poll()
    assert polled == []
    scribe.write("rank0", ev.Logged(step=11, values={"loss": 1.5}))
    fleet.poll()
    assert polled == ["tiny-gpt"]
    row = by_name(fleet)["tiny-gpt"]
    assert (row.step, row.loss, row.losses[-2:]) == (11, 1.5, (2.0, 1.5))
    other.run.stop_file.touch()
    other.incident(Cause.STOP_REQUESTED, Action.STOP, step=11)
    other.end("stop")
    fleet.poll()
    assert by_name(fleet)["other"].state == "stopped"
    # A run at rest that somebody has brought back is seen within 15 s.
    other.submitted("8812399")
    fleet.poll()
    assert by_name(fleet)["other"].state == "stopped"
    ticks.now += 16
    fleet.poll()
    assert by_name(fleet)["other"].state == "submitted"


def test_goodput_is_that_of_the_other_reports_where_attempts_are_archived(shell: Shell) -> None:
    scribe = Scribe(shell.folder / "runs", "tiny-gpt")
    scribe.now = time.time() - 9000
    for number in range(1, 10):
        scribe.later(900 if number < 7 else 9).begin("n01", "n02")
        scribe.later(14).resume(40 * number - 40)
        scribe.train(40 * number - 40, 40 * number)
        scribe.save(40 * number)
        scribe.preempted(40 * number)
    compact_journal(scribe.run, scribe.attempt, block=3, kept=1)
    scribe.later(9).begin("n01", "n02")
    scribe.resume(360)
    for rests in (False, True):
        if rests:
            scribe.held("crash")
            known = fleet_of(shell.folder)
            known.poll()
            known.close()
        fleet = fleet_of(shell.folder)
        fleet.poll()
        fleet.study(str(scribe.run.path))
        story = explain(gather(scribe.run, whole=True))
        assert by_name(fleet)["tiny-gpt"].goodput == pytest.approx(story.goodput, abs=0.02)


def test_runs_that_come_and_go_and_one_that_cannot_be_read(shell: Shell) -> None:
    training(shell.folder)
    broken = training(shell.folder, "broken")
    next(broken.run.journal.iterdir()).chmod(0o666)
    ticks = Ticks()
    fleet = fleet_of(shell.folder, None, ticks)
    fleet.poll()
    rows = by_name(fleet)
    assert rows["broken"].state == "unreadable"
    assert " unreadable " in View(80).row(rows["broken"], now=0.0, chosen=False).text
    assert "can be written by other users" in rows["broken"].words
    assert rows["tiny-gpt"].state == "running"
    training(shell.folder, "new")
    ticks.now += 16
    fleet.poll()
    assert set(by_name(fleet)) == {"tiny-gpt", "broken", "new"}


@pytest.mark.parametrize(("relaunched", "step"), [(True, 10), (True, 5), (False, 5)])
def test_what_goes_on_or_goes_back_has_its_own_pace(
    shell: Shell, relaunched: bool, step: int
) -> None:
    scribe = training(shell.folder)
    slow = ev.StragglerSeen(
        step=9, since_step=5, ranks=(5,), host="n02", factor=1.4, trial=1.3, why="node"
    )
    scribe.write("supervisor", slow)
    if relaunched:
        scribe.relaunch()
        # By the clock of another node, after the launch that it is not about.
        scribe.later(1).write("supervisor", slow, launch=1)
    scribe.now += 30
    scribe.resume(step)
    scribe.train(step + 1, step + 4, seconds=1.0)
    fleet = fleet_of(shell.folder)
    fleet.poll()
    row = by_name(fleet)["tiny-gpt"]
    assert row.step == step + 4
    assert row.step_s == pytest.approx(1.0)
    assert [each.host for each in row.slow] == ([] if relaunched else ["n02"])


def test_without_a_terminal_and_without_textual(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(shell.folder)
    result = shell("top")
    assert result.exit_code == 2
    assert "needs a terminal\n  For pipes and files: slurm-forge status" in result.stderr

    class Terminal:
        def isatty(self) -> bool:
            return True

    class System:
        stdin = stdout = Terminal()

    monkeypatch.setattr(verb, "sys", System)
    monkeypatch.setitem(sys.modules, "textual", None)
    result = shell("top")
    assert result.exit_code == 2
    assert "pip install 'slurm_forge[top]'" in result.stderr


@pytest.mark.slow
def test_in_a_terminal_without_colours_or_utf_8(shell: Shell) -> None:
    """The program itself: what it sends to a terminal that has neither."""
    training(shell.folder)
    child, terminal = pty.fork()
    if child == 0:
        variables = {**os.environ, "NO_COLOR": "1", "LC_ALL": "C", "PYTHONUTF8": "0"}
        variables |= {"PYTHONCOERCECLOCALE": "0", "TERM": "xterm"}
        words = [sys.executable, "-m", "slurm_forge", "top", "tiny-gpt"]
        os.execve(sys.executable, words, variables)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    output = b""
    try:
        until = time.monotonic() + 60
        while b"goodput" not in output and time.monotonic() < until:
            output += received(terminal)
        os.write(terminal, b"q")
        while time.monotonic() < until and (more := received(terminal)):
            output += more
    finally:
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    text = output.decode()
    assert text.isascii()
    assert "loss 2 ^^==--..__" in text
    colours = [m[1] for m in re.finditer(r"\x1b\[([0-9;]*)m", text)]
    used = {int(number or 0) for each in colours for number in each.split(";")}
    assert not used & {*range(30, 39), *range(40, 49), *range(90, 108)}


def received(terminal: int) -> bytes:
    """What comes within ten seconds; nothing at the end."""
    ready, _, _ = select.select([terminal], [], [], 10)
    if not ready:
        return b""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side is closed
        return b""
