"""``run``: what is shown while a run trains on this machine, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest

from slurm_forge.cli.preparation import check
from slurm_forge.cli.start.injected_faults import rehearsed
from slurm_forge.errors import ForgeError
from slurm_forge.journal import events as ev
from slurm_forge.launch.local import runner as local
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import JobSpec
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.cli.conftest import JOB, Shell
from tests.unit.report.journals import Scribe

Trainer = Callable[[Scribe, Callable[[], None]], int]


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trainer], list[int]]:
    """Put a trainer in the place of local tasks; the ranks it was given."""

    def install(trainer: Trainer) -> list[int]:
        given: list[int] = []

        def run_locally(
            run: RunDirectory,
            file: RunFile,
            ranks: int,
            progress: Callable[[], None],
            *,
            say: Callable[[str], None],
            again: bool,
        ) -> int:
            del file
            assert again, "a person asks for it"
            given.append(ranks)
            say("a line from below")
            return trainer(Scribe(run.path.parent, run.name), progress)

        monkeypatch.setattr(local, "run_locally", run_locally)
        return given

    return install


def finishes(scribe: Scribe, look: Callable[[], None]) -> int:
    scribe.begin("here", job="local-1", via="submitit local")
    scribe.resume(0)
    look()
    scribe.skip(1)
    scribe.train(2, 10)
    scribe.save(10, reason="final")
    look()
    scribe.finish(10)
    return 0


def test_what_happens_is_told_as_it_happens_and_explained_at_the_end(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    given = trains(finishes)
    result = shell("run", "train.yaml", "--ranks", "2")
    assert result.exit_code == 0, result.output
    assert given == [2]
    lines = [line.partition("  ")[2] for line in result.stdout.split("\n\n")[0].splitlines()]
    assert result.stdout.startswith("a line from below\n")
    assert lines[1:] == [
        "attempt 1, job local-1 on here",
        "training from the start on 8 ranks",
        "skipped the update of step 1 (samples 0-31)",
        "saved step 10 in 0.3 s (final)",
        "finished at step 10",
        "attempt 1 ended: finished",
    ]
    assert "\ntiny-gpt   finished   step 10 of 400" in result.stdout
    assert "\x1b" not in result.stdout  # not a terminal


def test_a_snapshot_that_can_not_be_made_names_the_line_that_wants_it(shell: Shell) -> None:
    (shell.folder / "train.yaml").write_text(f"{JOB}code: snapshot\n")
    result = shell("run", "train.yaml")
    assert result.exit_code == 2
    line = len(JOB.splitlines()) + 1
    assert f"train.yaml:{line}: code: {shell.folder} is in no git work tree" in result.stderr
    assert not (shell.folder / "runs" / "tiny-gpt").exists()


def test_a_later_start_and_a_fork_have_as_many_ranks_as_the_run_was_given_last(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    def stops(scribe: Scribe, look: Callable[[], None]) -> int:
        scribe.begin("here", job="local-1", via="submitit local")
        scribe.resume(0, world_size=3)
        scribe.save(2)
        scribe.end("stopped")
        return 1

    given = trains(stops)
    for words in (["train.yaml", "--ranks", "3"], ["train.yaml"], ["tiny-gpt"]):
        shell("run", *words)
    spec = RunDirectory.at(shell.folder / "runs" / "tiny-gpt").spec_file
    assert read_run_file(spec).with_job(read_run_file(spec).job).ranks == 3, "as a fork is made"
    shell("change", "tiny-gpt", "--set", "resources.tasks_per_node=4")
    shell("run", "tiny-gpt")
    shell("run", "tiny-gpt", "--ranks", "1")
    shell("run", "tiny-gpt")
    assert given == [3, 3, 3, 4, 1, 1]


def test_ranks_are_those_of_the_job_where_nothing_is_said(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    given = trains(finishes)
    job = JOB.replace("partition: long", "tasks_per_node: 4")
    (shell.folder / "train.yaml").write_text(job)
    assert shell("run", "train.yaml").exit_code == 0
    assert given == [4]


def test_a_run_that_is_held_exits_1_and_says_why(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    def fails(scribe: Scribe, look: Callable[[], None]) -> int:
        scribe.begin(job="local-1", via="submitit local")
        scribe.incident(Cause.APP_ERROR, Action.HOLD, text="KeyError: 'x'", rung=None)
        scribe.end("hold")
        return 1

    trains(fails)
    result = shell("run", "train.yaml")
    assert result.exit_code == 1
    assert "rank 0 on n01: KeyError: 'x'" in result.stdout
    assert "slurm-forge run tiny-gpt" in result.stdout


def test_a_run_goes_on_and_tells_only_what_is_new(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    def stops(scribe: Scribe, look: Callable[[], None]) -> int:
        scribe.begin(job="local-1", via="submitit local")
        scribe.resume(0)
        scribe.preempted(3)
        return 1

    def goes_on(scribe: Scribe, look: Callable[[], None]) -> int:
        scribe.later(60).begin(job="local-2", via="submitit local")
        scribe.resume(3)
        scribe.finish(10)
        return 0

    trains(stops)
    assert shell("run", "train.yaml").exit_code == 1
    trains(goes_on)
    result = shell("run", "train.yaml")
    assert result.exit_code == 0, result.output
    told = result.stdout.split("\n\n")[0]
    assert "attempt 2, job local-2" in told
    assert "resumed at step 3 on 8 ranks" in told
    assert "attempt 1" not in told
    assert "asked: run" not in told


def test_a_changed_job_file_is_another_run(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    def begins(scribe: Scribe, look: Callable[[], None]) -> int:
        scribe.begin()
        return 1

    trains(begins)
    shell("run", "train.yaml")
    (shell.folder / "train.yaml").write_text(JOB.replace("400", "800"))
    result = shell("run", "train.yaml")
    assert result.exit_code == 2
    assert "was started with a different job" in result.stderr


def test_a_finished_run_is_not_started_again(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    given = trains(finishes)
    shell("run", "train.yaml")
    result = shell("run", "train.yaml")
    assert result.exit_code == 0
    line, more = result.stdout.splitlines()
    assert line.startswith("tiny-gpt is already finished.   how it went: slurm-forge explain ")
    assert more.startswith("to train further: slurm-forge extend tiny-gpt --set args.KEY=")
    assert len(given) == 1


def test_an_interrupt_is_130_and_names_the_way_back(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    def interrupted(scribe: Scribe, look: Callable[[], None]) -> int:
        raise KeyboardInterrupt

    trains(interrupted)
    result = shell("run", "train.yaml")
    assert result.exit_code == 130
    assert "slurm-forge status tiny-gpt" in result.stderr


@pytest.mark.parametrize("options", [(), ("--ranks", "2", "--runs", "my runs")])
def test_a_run_ended_by_a_signal_says_where_it_stands_and_how_it_goes_on(
    shell: Shell, trains: Callable[[Trainer], list[int]], options: tuple[str, ...]
) -> None:
    def terminated(scribe: Scribe, look: Callable[[], None]) -> int:
        scribe.begin(job="local-1", via="submitit local")
        scribe.resume(0)
        scribe.train(1, 7)
        scribe.save(7, reason="stop")
        scribe.incident(Cause.STOP_REQUESTED, Action.STOP, text="SIGTERM", rung=None)
        scribe.end("stop")
        return 143

    trains(terminated)
    result = shell("run", "train.yaml", *options)
    assert result.exit_code == 143
    again = shlex.join(["slurm-forge", "run", "train.yaml", *options])
    assert result.stderr.endswith(
        f"tiny-gpt: stopped, the last checkpoint is of step 7.   to continue: {again}\n"
    )
    assert "attempt 1   " not in result.stdout, "explained at length"


def test_a_run_ended_by_a_signal_before_anything_was_saved_says_that(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    trains(lambda scribe, look: 130)
    result = shell("run", "train.yaml")
    assert result.exit_code == 130
    assert "stopped, no checkpoint yet." in result.stderr


def test_an_error_of_ours_is_a_message(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    def breaks(scribe: Scribe, look: Callable[[], None]) -> int:
        raise ForgeError("it broke \x1b[2J", next_step="Do this.")

    trains(breaks)
    result = shell("run", "train.yaml")
    assert result.exit_code == 2
    assert result.stderr.endswith("it broke \\x1b[2J\n  Do this.\n")


def test_for_programs_what_a_person_is_told_goes_elsewhere(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    trains(finishes)
    result = shell("run", "train.yaml", "--json")
    assert json.loads(result.stdout)["status"] == "finished"
    assert result.stderr == "a line from below\n"


def test_a_note_of_a_journal_can_not_write_to_the_terminal(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    def notes(scribe: Scribe, look: Callable[[], None]) -> int:
        scribe.begin()
        scribe.write("supervisor", ev.Note(text="[bold]x[/] \x1b]0;title\x07"))
        look()
        return 1

    trains(notes)
    result = shell("run", "train.yaml")
    assert "[bold]x[/] ?]0;title?\n" in result.stdout


# -- faults on purpose ----------------------------------------------------------------------------


def job_of(shell: Shell) -> JobSpec:
    return read_run_file(shell.folder / "runs" / "tiny-gpt" / "run.yaml").job


def test_a_command_is_for_exec(shell: Shell) -> None:
    (shell.folder / "my job.yaml").write_text("name: x\ncommand: ['true']\n")
    result = shell("run", "my job.yaml")
    assert result.exit_code == 2
    assert "my job.yaml: command: slurm-forge run trains an entry\n" in result.stderr
    assert "slurm-forge exec --job 'my job.yaml'\n" in result.stderr
    assert not (shell.folder / "runs").exists()


def test_faults_for_a_command_are_told_to_be_of_little_use(shell: Shell) -> None:
    (shell.folder / "job.yaml").write_text("name: x\ncommand: ['true']\ninject: [nan@3]\n")
    checked = rehearsed(check(shell.folder / "job.yaml"), [], ranks=1)
    assert "nan@3; in a command they strike only ranks that join the run" in checked.doubts[0]


def test_faults_of_the_command_line_join_those_of_the_job_file(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    trains(finishes)
    (shell.folder / "train.yaml").write_text(JOB + "inject: [term@5]\n")
    faults = "nan@120,oom@200:rank1,spike@300,kill@350:rank0"
    result = shell("run", "train.yaml", "--ranks", "2", "--inject", faults, "--inject", "term@5")
    assert result.exit_code == 0, result.output
    told = "injected faults: term@5, nan@120, oom@200:rank1, spike@300, kill@350:rank0\n"
    assert told in result.stderr
    assert ", ".join(map(str, job_of(shell).inject)) == told[17:-1]


@pytest.mark.parametrize(("faults", "said"), [
    ("nna@120", '--inject: "nna" is not a known fault (did you mean "nan"?)'),
    ("nan@120,kill", '--inject: "kill": missing step; write kill@120'),
    ("nan@120:rank2", "nan@120:rank2: there is no rank 2\n  There are 2 ranks, counted from 0."),
])  # fmt: skip
def test_a_wrong_fault_is_told_before_anything_is_made(
    shell: Shell, trains: Callable[[Trainer], list[int]], faults: str, said: str
) -> None:
    given = trains(finishes)
    result = shell("run", "train.yaml", "--ranks", "2", "--inject", faults)
    assert result.exit_code == 2
    assert said in result.stderr
    assert given == []
    assert not (shell.folder / "runs").exists()


def test_a_rehearsed_run_goes_on_without_its_faults(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    def interrupted(scribe: Scribe, look: Callable[[], None]) -> int:
        scribe.begin(job="local-1", via="submitit local")
        scribe.resume(0)
        scribe.end("stop")
        return 143

    trains(interrupted)
    result = shell("run", "train.yaml", "--inject", "nan@3,kill@4")
    assert "to continue: slurm-forge run train.yaml --inject nan@3,kill@4\n" in result.stderr
    trains(lambda scribe, look: 0)
    result = shell("run", "train.yaml")
    assert result.exit_code == 0, result.output
    assert "on purpose" not in result.stderr
    assert job_of(shell).inject == ()


def test_nodes_of_the_job_file_are_ignored_aloud_and_the_output_is_named(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    trains(finishes)
    (shell.folder / "train.yaml").write_text(JOB.replace("{partition", "{nodes: 2, partition"))
    told = shell("run", "train.yaml").stderr
    assert "resources.nodes: 2 is ignored: 1 rank on this machine (--ranks N)\n" in told
    assert "output of the ranks: runs/tiny-gpt/submissions/*_log.out (and .err)\n" in told


def test_a_run_in_place_of_a_job_file_continues_as_it_is(
    shell: Shell, trains: Callable[[Trainer], list[int]]
) -> None:
    def fails(scribe: Scribe, look: Callable[[], None]) -> int:
        scribe.begin("here", job="local-1", via="submitit local")
        scribe.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
        scribe.end("hold")
        return 1

    trains(fails)
    shell("run", "train.yaml")
    (shell.folder / "train.yaml").unlink()
    given = trains(finishes)
    shell("change", "tiny-gpt", "--set", "resources.tasks_per_node=3")
    result = shell("run", "tiny-gpt")
    assert result.exit_code == 0, result.output
    assert given == [3]
    assert "tiny-gpt is already finished" in shell("run", "runs/tiny-gpt").stdout


@pytest.mark.parametrize("option", [("--set", "args.max_steps=9"), ("--inject", "nan@3")])
def test_a_run_in_place_of_a_job_file_keeps_its_job(
    shell: Shell, trains: Callable[[Trainer], list[int]], option: tuple[str, str]
) -> None:
    trains(finishes)
    shell("run", "train.yaml")
    result = shell("run", "tiny-gpt", *option)
    assert result.exit_code == 2
    assert "slurm-forge change tiny-gpt" in result.stderr


def test_neither_a_file_nor_a_run_is_what_a_missing_file_is(shell: Shell) -> None:
    result = shell("run", "trian.yaml")
    assert result.exit_code == 2
    assert "trian.yaml" in result.stderr


def test_the_closing_words_of_a_run_whose_processes_are_gone_are_those_of_explain(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(run: object, **given: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["false"], start_new_session=True)

    monkeypatch.setattr(local, "start_tasks", killed)
    result = shell("run", "train.yaml")
    assert result.exit_code == 1
    assert "nothing to do" not in result.stdout
    assert "ended unexpectedly" in result.stdout
    assert shell("explain", "tiny-gpt").stdout in result.stdout


@pytest.mark.parametrize(
    ("number", "step"),
    [(errno.ENOSPC, "df -i"), (errno.EROFS, "--runs DIR"), (errno.EDQUOT, "quota")],
)
def test_what_the_system_refuses_ends_with_a_next_step(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    def refused(*words: object, **more: object) -> None:
        raise OSError(number, os.strerror(number), "runs")

    monkeypatch.setattr("slurm_forge.cli.preparation.create_run", refused)
    result = shell("run", "train.yaml")
    assert result.exit_code == 2
    first, second = result.stderr.strip().splitlines()[:2]
    assert first == f"runs: {os.strerror(number)}"
    assert step in second


def test_what_was_closed_is_open_to_whatever_is_started() -> None:
    """Ranks write their logs over what they inherit: a closed one takes them to nowhere."""
    code = (
        "import os\n"
        "told = os.dup(1)\n"
        "for number in range(3): os.close(number)\n"
        "from slurm_forge.cli.main import _open_closed\n"
        "_open_closed()\n"
        "os.write(told, b'%d %d %d' % tuple(os.get_inheritable(each) for each in range(3)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=60
    )
    assert ended.stdout == b"1 1 1", ended
