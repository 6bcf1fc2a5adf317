"""``slurm-forge run`` that is told to end, killed, or started twice: real commands, real ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import slurm_forge as forge
from slurm_forge.journal import JournalWriter, RunStatus
from slurm_forge.journal.events import AttemptStarted
from slurm_forge.launch.attempt.lifeline import GONE
from slurm_forge.launch.submit.submission import run_state
from slurm_forge.run_directory import RunDirectory, claim_attempt, newest_claim
from slurm_forge.vocabulary.cause import Cause

pytestmark = [pytest.mark.distributed]

WITHIN_S = 240.0
#: Ctrl-C counts, whatever started the tests had done about it.
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from slurm_forge.cli.main import main
main()
"""


def train(run: forge.Run) -> None:
    """Goes on until it is stopped; a few steps where the file ``enough`` was there before.

    ``stuck`` keeps every rank in a step while it is there, ``wrong`` is an error.
    """
    model = DistributedDataParallel(nn.Linear(4, 2))
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    few = (run.directory / "enough").exists()
    data = TensorDataset(torch.randn(64, 4))
    batches = run.batches(data, global_batch_size=8, until=forge.Steps(10_000_000))
    for done, batch in enumerate(batches):
        if few and done == 3:
            return
        while (run.directory / "stuck").exists():
            time.sleep(0.02)
        if (run.directory / "wrong").exists():
            raise RuntimeError("something is wrong")
        run.train_step(batch, lambda micro: model(micro[0]).square().mean())


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


def living(group: int) -> list[int]:
    """Processes of a group; those that only wait for init to notice that they ended don't count."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group = entry.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                found.append(int(entry.parent.name))
    return found


class Command:
    """One ``slurm-forge`` command as a terminal would start it, in a process group of its own."""

    def __init__(self, folder: Path, number: int, *words: str) -> None:
        self._output = folder / f"output-{number}"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._output.read_text()

    def says(self, words: str) -> Command:
        until(lambda: words in self.text or self.process.poll() is not None, words)
        assert words in self.text, self.text
        return self

    def get(self, number: signal.Signals) -> Command:
        """As from a keyboard: the whole foreground group gets it."""
        os.killpg(self.process.pid, number)
        return self

    def ends(self) -> int:
        return self.process.wait(WITHIN_S)


class Terminal:
    """A folder with a job; everything that was started there is ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunDirectory.at(folder / "runs" / "tiny")
        self._commands: list[Command] = []
        text = f"name: tiny\nentry: {__file__}:train\nprobe: {{enabled: false}}\n"
        (folder / "job.yaml").write_text(text + "resources: {tasks_per_node: 2}\n")

    def types(self, *words: str) -> Command:
        self._commands.append(Command(self.folder, len(self._commands), *words))
        return self._commands[-1]

    def trains(self) -> Command:
        return self.is_training(self.types("run", "job.yaml"))

    def is_training(self, command: Command) -> Command:
        """Once all ranks are known to train: something was saved because we asked."""
        command.says("training from the start on 2 ranks")
        self.run.save_file.touch()
        return command.says("(SAVE file)")

    def waits_before_each_start(self) -> Terminal:
        """An hour, whatever the attempt before has ended of."""
        waits = ", ".join(
            f"{cause}: [{{do: requeue, times: 3, wait: 1h}}]"
            for cause in ("app_error", "crash", "unknown")
        )
        with (self.folder / "job.yaml").open("a") as job:
            job.write(f"recovery: {{{waits}}}\n")
        return self

    @property
    def group(self) -> int:
        return int(run_state(self.run).job.removeprefix("local-"))

    def nobody_is_left(self) -> bool:
        return not living(self.group)

    def goes_on_and_finishes(self) -> str:
        (self.run.path / "stuck").unlink(missing_ok=True)
        (self.run.path / "enough").touch()
        command = self.types("run", "job.yaml")
        assert command.ends() == 0, command.text
        assert run_state(self.run).status is RunStatus.FINISHED
        return command.text

    def close(self) -> None:
        for command in self._commands:
            if command.process.poll() is None:
                command.process.kill()
                command.process.wait()
        if self._commands and run_state(self.run).job and not self.nobody_is_left():
            os.killpg(self.group, signal.SIGKILL)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def stopped_by(terminal: Terminal) -> str:
    """Why the first attempt ended, which must have saved where it was stopped."""
    (attempt,) = run_state(terminal.run).attempts
    ((_, incident),) = attempt.incidents
    assert incident.cause is Cause.STOP_REQUESTED
    (*_, (_, last)) = attempt.checkpoints
    assert (last.reason, last.step) == ("stop", incident.step)
    assert attempt.outcome == "stop"
    return incident.evidence[0].text


def test_sigterm_saves_and_stops_and_the_same_command_goes_on(terminal: Terminal) -> None:
    command = terminal.types("run", "job.yaml").says("attempt 1")
    beside = terminal.types("run", "job.yaml")
    assert beside.ends() == 2, "a second one was let in"
    assert f"is being trained already, by process {command.process.pid} on" in beside.text
    terminal.is_training(command).process.terminate()
    assert command.ends() == 128 + signal.SIGTERM, command.text
    assert "saving at the next step; once more ends it at once" in command.text
    assert terminal.nobody_is_left()
    assert stopped_by(terminal) == "SIGTERM"
    state = run_state(terminal.run)
    assert state.status is RunStatus.STOPPED
    assert f"the last checkpoint is of step {state.committed_step}" in command.text
    assert "to continue: slurm-forge run job.yaml" in command.text
    assert not terminal.run.stop_file.exists()
    terminal.run.stop_file.touch()  # somebody's request of yesterday
    terminal.goes_on_and_finishes()
    resumed = run_state(terminal.run).attempts[1].launches[0].resumed
    assert resumed is not None
    assert resumed.step == state.committed_step


@pytest.mark.slow
def test_a_second_interrupt_ends_every_process_at_once(terminal: Terminal) -> None:
    command = terminal.trains()
    (terminal.run.path / "stuck").touch()
    command.get(signal.SIGINT).says("SIGINT: stopping")
    time.sleep(1.1)  # within a second it would count as the same request, passed on twice
    command.get(signal.SIGINT).says("ending all processes")
    assert command.ends() == 128 + signal.SIGINT, command.text
    until(terminal.nobody_is_left, "the end of the ranks")
    state = run_state(terminal.run)
    ((_, incident),) = state.attempts[0].incidents
    assert state.status is RunStatus.STOPPED
    assert incident.evidence[0].text == "SIGINT, and its processes were ended at once"
    assert "resumed at step" in terminal.goes_on_and_finishes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_signals_of_a_terminal_reach_the_command_alone(
    terminal: Terminal, number: signal.Signals
) -> None:
    assert terminal.trains().get(number).ends() == 128 + number
    assert terminal.nobody_is_left()
    assert stopped_by(terminal) == number.name
    notices = [notice.source for _, notice in run_state(terminal.run).attempts[0].notices]
    assert notices == ["file", "starter"], "the ranks got it too"


@pytest.mark.slow
def test_ranks_whose_command_was_killed_save_and_end(terminal: Terminal) -> None:
    command = terminal.trains()
    (terminal.run.path / "stuck").touch()
    command.process.kill()
    command.ends()
    beside = terminal.types("run", "job.yaml")
    assert beside.ends() == 2, "let in although ranks of the killed one are there"
    assert f"process {command.process.pid}, which had started it, is gone" in beside.text
    (terminal.run.path / "stuck").unlink()
    until(terminal.nobody_is_left, "the end of the ranks")
    assert stopped_by(terminal) == GONE
    assert "resumed at step" in terminal.goes_on_and_finishes()
    assert len(run_state(terminal.run).attempts) == 2, "started again in the background"


@pytest.mark.slow
def test_ranks_that_nobody_watches_over_are_ended_before_others_are_started(
    terminal: Terminal,
) -> None:
    command = terminal.trains()
    (terminal.run.path / "stuck").touch()  # else they would end when their channel does
    group = terminal.group
    os.kill(group, signal.SIGKILL)
    command.says("attempt 2")
    assert not living(group)
    (terminal.run.path / "stuck").unlink()
    (terminal.run.path / "enough").touch()
    assert command.ends() == 0, command.text


@pytest.mark.slow
def test_a_run_that_is_stopped_while_it_starts_does_not_wait_for_anybody(
    terminal: Terminal,
) -> None:
    command = terminal.types("run", "job.yaml").says("submitted as job")
    command.process.terminate()
    assert command.ends() == 128 + signal.SIGTERM, command.text
    assert terminal.nobody_is_left()
    assert "stopped" in terminal.types("status", "tiny").says("next").text
    terminal.goes_on_and_finishes()


def waits_for_its_next_start(terminal: Terminal, *, killed: bool) -> None:
    """In rank 0, which conducts, or where that was killed in the command itself."""
    if killed:
        claim = newest_claim(terminal.run)
        assert claim is not None
        os.kill(claim.pid, signal.SIGKILL)
        until(lambda: run_state(terminal.run).status is RunStatus.REQUEUED, "the wait")
    else:
        (terminal.run.path / "wrong").touch()
        until(lambda: run_state(terminal.run).attempts[0].decisions, "the decision")


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_waits_for_its_next_start_is_stopped_without_one(
    terminal: Terminal, killed: bool
) -> None:
    command = terminal.waits_before_each_start().trains()
    waits_for_its_next_start(terminal, killed=killed)
    command.process.terminate()
    assert command.ends() == 128 + signal.SIGTERM, command.text
    assert terminal.nobody_is_left()
    assert "SIGTERM: stopping: nothing was being trained, nothing is lost" in command.text
    state = run_state(terminal.run)
    (attempt,) = state.attempts
    assert (state.status, state.reason) == (
        RunStatus.STOPPED,
        "SIGTERM before the next attempt began",
    )
    assert [incident.cause for _, incident in attempt.incidents] == [
        Cause.CRASH if killed else Cause.APP_ERROR
    ]
    assert f"the last checkpoint is of step {state.committed_step}" in command.text
    told = terminal.types("explain", "tiny").says("SIGTERM before the next attempt began")
    assert "gone without a word" not in told.text
    assert "stopped" in terminal.types("status", "tiny").says("next").text
    (terminal.run.path / "wrong").unlink(missing_ok=True)
    assert "resumed at step" in terminal.goes_on_and_finishes()


def test_ranks_that_wait_for_their_next_start_notice_that_the_command_was_killed(
    terminal: Terminal,
) -> None:
    command = terminal.waits_before_each_start().trains()
    waits_for_its_next_start(terminal, killed=False)
    command.process.kill()
    command.ends()
    until(terminal.nobody_is_left, "the end of the ranks")
    state = run_state(terminal.run)
    assert (len(state.attempts), state.status) == (1, RunStatus.STOPPED)


@pytest.mark.slow
def test_after_everything_was_killed_status_says_so_and_nothing_is_in_the_way(
    terminal: Terminal,
) -> None:
    command = terminal.trains()
    assert "running: training" in terminal.types("status", "tiny").says("next").text
    command.process.kill()
    os.killpg(terminal.group, signal.SIGKILL)
    until(terminal.nobody_is_left, "the end of the ranks")
    status = terminal.types("status", "tiny").says("next").text
    assert "ended unexpectedly: none of its processes is left on this machine" in status
    assert "slurm-forge run tiny" in status
    assert "resumed at step" in terminal.goes_on_and_finishes()


@pytest.mark.slow
def test_a_rank_0_that_is_killed_each_time_ends_in_a_hold_that_every_command_tells(
    terminal: Terminal,
) -> None:
    with (terminal.folder / "job.yaml").open("a") as job:
        job.write("recovery: {crash: [{do: requeue, times: 2}]}\n")
    command = terminal.trains()

    def resumed(number: int) -> bool:
        attempts = run_state(terminal.run).attempts
        newest = attempts[-1].launches if attempts and attempts[-1].number == number else ()
        return bool(newest) and newest[-1].resumed is not None

    for number in (1, 2, 3):
        until(lambda number=number: resumed(number), f"attempt {number}")  # type: ignore[misc]
        claim = newest_claim(terminal.run)
        assert claim is not None
        os.kill(claim.pid, signal.SIGKILL)  # rank 0, which conducts the run
    assert command.ends() == 1, command.text
    state = run_state(terminal.run)
    assert state.status is RunStatus.HELD
    assert [each.outcome for each in state.attempts] == ["requeued", "requeued", "held"]
    assert "nothing left to try" in state.reason
    for attempt in state.attempts:
        ((_, incident),) = attempt.incidents
        assert (incident.cause, incident.rank) == (Cause.CRASH, 0)
        # Where its parent had collected it before the witness came to look, how is not known.
        assert incident.evidence[0].text in ("killed by SIGKILL", "ended without a message")
    terminal.types("explain", "tiny").says("nothing left to try")
    told = terminal.types("status", "tiny").says("held")
    assert told.ends() == 0
    assert "running" not in told.text
    terminal.goes_on_and_finishes()


@pytest.mark.slow
def test_a_run_that_another_attempt_has_taken_over_just_ends_here(terminal: Terminal) -> None:
    command = terminal.trains()
    run = terminal.run
    claim = claim_attempt(
        run, job="77", restart_count=0, host="elsewhere", pid=1, nodes=("n9",), time=time.time()
    )
    journal = JournalWriter(run, attempt=claim.attempt, writer="supervisor")
    journal.write(
        AttemptStarted(job="77", restart_count=0, nodes=("n9",), host="elsewhere", via="sbatch")
    )
    journal.close()
    run.save_file.touch()
    assert command.ends() == 1, command.text
    assert "tiny has been taken over by 77" in command.text
    first, second = run_state(run).attempts
    assert (first.outcome, first.incidents, first.decisions) == ("taken over", (), ())
    assert second.job == "77", "started against it again"
