"""``status`` and ``explain`` as commands: which run, which output, which exit status."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_forge.cli.observe import status as looking
from slurm_forge.journal import compact_journal
from slurm_forge.journal import events as ev
from slurm_forge.launch.attempt.run_lock import hold_run_lock
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.cli.conftest import Shell
from tests.unit.report.journals import Scribe


def trained(scribe: Scribe) -> None:
    scribe.now = time.time() - 700
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 50)
    scribe.save(50)


@pytest.mark.parametrize("ahead", [0, 3600, -3600])
def test_status_shows_the_screen(shell: Shell, scribe: Scribe, ahead: int) -> None:
    scribe.ahead = ahead
    trained(scribe)
    result = shell("status", "tiny-gpt")
    assert result.exit_code == 0
    assert "status      running: training" in result.stdout
    assert ", last heard from 3 min" in result.stdout
    assert "step        50 of 400 (12.5 %)\n" in result.stdout
    assert result.stderr == ""


def test_status_and_explain_for_programs(shell: Shell, scribe: Scribe) -> None:
    trained(scribe)
    status = json.loads(shell("status", "tiny-gpt", "--json").stdout)
    assert (status["step"], status["total_steps"], status["status"]) == (50, 400, "running")
    story = json.loads(shell("explain", "tiny-gpt", "--json").stdout)
    assert [attempt["number"] for attempt in story["attempts"]] == [1]


def test_the_end_is_where_the_program_says_it_is(shell: Shell, scribe: Scribe) -> None:
    trained(scribe)
    scribe.write("rank0", ev.Resumed(step=50, checkpoint=None, world_size=2, until=75))
    status = json.loads(shell("status", "tiny-gpt", "--json").stdout)
    assert (status["step"], status["total_steps"]) == (50, 75)


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_the_end_is_where_the_newest_attempt_says_it_is(
    shell: Shell, scribe: Scribe, ahead: int
) -> None:
    scribe.now = time.time() - 700
    for until, scribe.ahead in ((75, ahead), (90, 0), (80, -ahead)):
        scribe.later(60).begin()
        scribe.write("rank0", ev.Resumed(step=0, checkpoint=None, world_size=2, until=until))
    assert json.loads(shell("status", "tiny-gpt", "--json").stdout)["total_steps"] == 80
    assert json.loads(shell("explain", "tiny-gpt", "--json").stdout)["total_steps"] == 80


@pytest.mark.parametrize("verb", ["status", "explain"])
def test_a_run_without_a_journal(shell: Shell, scribe: Scribe, verb: str) -> None:
    result = shell(verb, "tiny-gpt")
    assert result.exit_code == 0
    assert "not started yet" in result.stdout


@pytest.mark.parametrize("verb", ["status", "explain"])
def test_a_damaged_run_file_stops_no_report(shell: Shell, scribe: Scribe, verb: str) -> None:
    trained(scribe)
    scribe.run.spec_file.write_text("job: [\n")
    result = shell(verb, "tiny-gpt")
    assert result.exit_code == 0
    assert "run.yaml can't be read" in result.stdout
    assert "step" in result.stdout


def test_a_damaged_line_is_told(shell: Shell, scribe: Scribe) -> None:
    trained(scribe)
    path = next(scribe.run.journal.glob("1-rank0-*"))
    path.write_bytes(b"\x1b[2Jgarbage\n" + path.read_bytes())
    result = shell("status", "tiny-gpt")
    assert f"damaged line ignored: {path.name}, line 1:" in result.stdout
    assert "step        50 of 400" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_run_by_path_by_knob_and_by_option(
    shell: Shell, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shell.folder / "runs").rename(shell.folder / "elsewhere")
    assert shell("status", "./elsewhere/tiny-gpt").exit_code == 0
    assert shell("status", "tiny-gpt", "--runs", "elsewhere").exit_code == 0
    # The way on must work as it is printed: the name alone would not be found.
    told = shell("status", "tiny-gpt", "--runs", "elsewhere").stdout
    assert "slurm-forge requeue ./elsewhere/tiny-gpt" in told
    assert shell("status", "tiny-gpt").exit_code == 2
    monkeypatch.setenv("SLURM_FORGE_RUNS", str(shell.folder / "elsewhere"))
    told = shell("status", "tiny-gpt").stdout
    assert "slurm-forge requeue tiny-gpt" in told
    monkeypatch.chdir(shell.folder / "elsewhere" / "tiny-gpt")
    assert shell("status", ".").exit_code == 0


def test_an_unknown_run_is_one_message_with_the_nearest_name(shell: Shell, scribe: Scribe) -> None:
    result = shell("status", "tiny-gtp")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "there is no run 'tiny-gtp' in " in result.stderr
    assert '(did you mean "tiny-gpt"?)' in result.stderr
    assert "Traceback" not in result.stderr


def test_no_runs_at_all(shell: Shell) -> None:
    result = shell("explain", "tiny-gpt")
    assert result.exit_code == 2
    assert "--runs DIR" in result.stderr


def test_explain_one_attempt(shell: Shell, scribe: Scribe) -> None:
    trained(scribe)
    scribe.preempted(51)
    scribe.later(60).begin()
    result = shell("explain", "tiny-gpt", "--attempt", "1")
    assert "notice: SIGTERM (rank 3)" in result.stdout
    assert "\nattempt 2" not in result.stdout
    result = shell("explain", "tiny-gpt", "--attempt", "3")
    assert result.exit_code == 2
    assert "has no attempt 3\n  Its attempts: 1, 2." in result.stderr


def test_archived_attempts_are_summed_up_and_told_when_asked_for(
    shell: Shell, scribe: Scribe
) -> None:
    scribe.now = time.time() - 9000
    for number in range(1, 10):
        scribe.later(600).begin("n01", "n02")
        scribe.later(14).resume(40 * number - 40)
        scribe.train(40 * number - 40, 40 * number)
        scribe.save(40 * number)
        scribe.preempted(40 * number)
    whole = shell("explain", "tiny-gpt").stdout
    compact_journal(scribe.run, scribe.attempt, block=3, kept=1)
    brief = shell("explain", "tiny-gpt").stdout
    assert brief.splitlines()[0].count("9 attempts, 9 launches   since attempt 7 goodput") == 1
    assert "\nattempts 1 to 6   " in brief
    assert "up to step 240\n  6 incidents: preempted 6\n" in brief
    assert "explain tiny-gpt --all   (or --attempt N)" in brief
    told = [line for line in brief.splitlines() if line.startswith("attempt ")]
    assert [line.split()[1] for line in told] == ["7", "8", "9"]
    assert brief[brief.index("attempt 8 ") : brief.index("What it cost")] in whole
    assert shell("explain", "tiny-gpt", "--all").stdout == whole
    assert "notice: SIGTERM" in shell("explain", "tiny-gpt", "--attempt", "2").stdout
    assert len(json.loads(shell("explain", "tiny-gpt", "--json").stdout)["attempts"]) == 9
    missing = shell("explain", "tiny-gpt", "--attempt", "11").stderr
    assert "Its attempts: 1 to 6, 7, 8, 9." in missing


def test_a_journal_of_somebody_else_is_not_believed(shell: Shell, scribe: Scribe) -> None:
    trained(scribe)
    path = next(scribe.run.journal.glob("1-rank0-*"))
    path.chmod(0o666)
    result = shell("status", "tiny-gpt")
    assert result.exit_code == 2
    assert "can be written by other users" in result.stderr


class Waiting:
    """``time`` for one module: threads that other tests have left behind sleep as they did."""

    monotonic, time = staticmethod(time.monotonic), staticmethod(time.time)

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.sleep = sleep


def test_following_tells_what_happens_until_the_run_rests(
    shell: Shell, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(scribe)

    def later(seconds: float) -> None:
        """What the run writes while the follower waits."""
        del seconds
        if not scribe.run.is_done():
            scribe.train(51, 60)
            scribe.write("supervisor", ev.Note(text="a spare node joined\x1b[2J"))
            scribe.finish(60)

    monkeypatch.setattr(looking, "time", Waiting(later))
    monkeypatch.setattr(looking, "_LOOK_EVERY_S", 0.0)
    result = shell("status", "tiny-gpt", "--follow")
    assert result.exit_code == 0
    first, last = result.stdout.split("a spare node joined?[2J\n")
    assert "running: training" in first
    assert "saved step 50" not in result.stdout  # that was before
    assert "  finished at step 60\n" in last
    assert "status      finished\n" in last


def test_following_a_run_at_rest_ends_at_once(shell: Shell, scribe: Scribe) -> None:
    trained(scribe)
    scribe.finish(50)
    result = shell("status", "tiny-gpt", "--follow")
    assert result.stdout.count("status      finished") == 1


def test_following_tells_the_logged_figures_now_and_then(
    shell: Shell, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(scribe)
    steps = iter(range(51, 60))

    def later(seconds: float) -> None:
        """What the run writes while the follower waits."""
        del seconds
        step = next(steps, None)
        if step is None:
            scribe.finish(60)
        else:
            scribe.write("rank0", ev.Logged(step=step, values={"loss": 100.0 - step}))

    monkeypatch.setattr(looking, "time", Waiting(later))
    monkeypatch.setattr(looking, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(looking, "_FIGURES_EVERY_S", 0.0)
    told = shell("status", "tiny-gpt", "--follow").stdout
    assert "  loss 49 (step 51)\n" in told
    assert "  loss 41 (step 59)\n" in told


def test_figures_are_not_told_every_second(
    shell: Shell, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(scribe)
    steps = iter(range(51, 60))

    def later(seconds: float) -> None:
        """A second in which the run logs a figure."""
        del seconds
        step = next(steps, None)
        if step is None:
            scribe.finish(60)
        else:
            scribe.write("rank0", ev.Logged(step=step, values={"loss": 1.0 * step}))

    monkeypatch.setattr(looking, "time", Waiting(later))
    told = shell("status", "tiny-gpt", "--follow").stdout
    assert told.count("loss") == told.count("logged      loss 59 (step 59)\n") == 1


def test_what_is_logged_now_and_then_is_not_lost_to_what_is_logged_often(
    shell: Shell, scribe: Scribe
) -> None:
    trained(scribe)
    scribe.write("rank0", ev.Logged(step=51, values={"loss": 2.0, 'val"x': 3.0}))
    for step in range(52, 60):
        scribe.write("rank0", ev.Progress(step=step))
        scribe.write("rank0", ev.Logged(step=step, values={"loss": 1.0}))
    told = shell("status", "tiny-gpt").stdout
    assert 'logged      loss 1 (step 59); val"x 3 (step 51)\n' in told


def test_without_a_run_there_is_a_line_for_each(shell: Shell, scribe: Scribe) -> None:
    trained(scribe)
    old = Scribe(shell.folder / "runs", "older")
    old.now = time.time() - 7200
    old.begin()
    old.resume(0)
    old.finish(1234)
    bad = Scribe(shell.folder / "runs", "bad")
    bad.begin()
    next(bad.run.journal.iterdir()).chmod(0o666)
    Scribe(shell.folder / "runs", "fresh")
    result = shell("status")
    assert result.exit_code == 0, result.stderr
    lines = [line.split("   ") for line in result.stdout.splitlines()]
    told = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert [line[0] for line in told] == ["tiny-gpt", "older", "bad", "fresh"]
    assert told[0][1:3] == ["running", "step 50 of 400"]
    assert told[0][3] == "job 8812301"
    assert told[0][4].endswith(" ago")
    assert told[1][1:] == ["finished", "step 1234 of 400", "job 8812301", "2 h ago"]
    assert told[2][1] == "unreadable"
    assert "can be written by other users" in told[2][2]
    assert told[3][1:] == ["new"]
    body = json.loads(shell("status", "--json").stdout)
    assert [run["run"] for run in body["runs"]] == ["tiny-gpt", "older", "bad", "fresh"]
    assert list(body) == ["schema", "folder", "runs", "elsewhere", "sweeps"]
    assert list(body["runs"][0]) == [
        "run", "path", "status", "words", "job", "step", "total_steps", "age_s",
    ]  # fmt: skip


def test_a_list_of_no_runs(shell: Shell) -> None:
    result = shell("status")
    assert result.exit_code == 0
    assert result.stdout == f"no runs in {shell.folder / 'runs'}\n"
    assert shell("status", "--follow").exit_code == 2


def test_runs_of_submitits_executor_are_found_by_their_name(shell: Shell, scribe: Scribe) -> None:
    other = Scribe(shell.folder / "logs" / "runs", "train-07b268")
    other.begin()
    told = shell("status", "train-07b268")
    assert told.exit_code == 0, told.stderr
    assert "slurm-forge requeue ./logs/runs/train-07b268\n" in told.stdout
    assert "more runs in logs/runs: slurm-forge status --runs logs/runs\n" in shell("status").stdout
    # Where a folder is named, or two hold that name, nothing is guessed.
    assert shell("status", "train-07b268", "--runs", "runs").exit_code == 2
    Scribe(shell.folder / "more" / "runs", "train-07b268")
    unsure = shell("status", "train-07b268")
    assert unsure.exit_code == 2
    assert "lie in FOLDER/runs" in unsure.stderr


def test_explain_names_the_files_that_hold_the_output(shell: Shell, scribe: Scribe) -> None:
    scribe.begin(job="local-77", via="submitit local")
    scribe.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    scribe.end("hold")
    (scribe.run.submissions / "77_0_log.err").touch()
    (scribe.run.submissions / "77_0_log.out").write_text("ValueError\n")
    told = shell("explain", "tiny-gpt").stdout
    # The empty one would be no help.
    assert "  output: runs/tiny-gpt/submissions/77_0_log.out\n" in told
    assert (shell.folder / "runs/tiny-gpt/submissions/77_0_log.out").is_file()


def test_explain_finds_the_output_in_the_folder_of_submitits_executor(shell: Shell) -> None:
    other = Scribe(shell.folder / "logs" / "runs", "train-07b268")
    other.begin(job="6", via="submitit forge")
    (shell.folder / "logs" / "6_0_log.err").write_text("a warning\n")
    told = shell("explain", "train-07b268", "--attempt", "1").stdout
    assert "  output: logs/6_0_log.err\n" in told


def test_follow_and_json_exclude_each_other(shell: Shell, scribe: Scribe) -> None:
    assert shell("status", "tiny-gpt", "--follow", "--json").exit_code == 2


def test_a_controller_that_does_not_answer_is_said_to_be_silent(
    shell: Shell, scribe: Scribe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(scontrol.parent), prepend=":")
    trained(scribe)
    scribe.requeued()
    for verb in ("status", "explain"):
        text = shell(verb, "tiny-gpt").stdout
        assert "; Slurm does not answer: whether it is queued is unknown" in text
        assert "it starts when resources are free" not in text


def test_a_run_that_is_a_file(shell: Shell, tmp_path: Path) -> None:
    result = shell("status", "./train.yaml")
    assert result.exit_code == 2
    assert "holds no run" in result.stderr


@pytest.mark.parametrize("words", [("status",), ("status", "--follow"), ("explain",)])
@pytest.mark.parametrize("saved", [False, True])
def test_a_run_whose_processes_on_this_machine_are_gone_is_not_said_to_train(
    shell: Shell, scribe: Scribe, words: tuple[str, ...], saved: bool
) -> None:
    scribe.now = time.time() - 20
    scribe.begin(job="local-7", via="submitit local")
    scribe.resume(0)
    scribe.train(1, 50)
    with hold_run_lock(scribe.run) as presence:
        presence.name("local-7")
        assert "running: training\n" in shell("status", "tiny-gpt").stdout
        assert "tiny-gpt   running   step 50" in shell("explain", "tiny-gpt").stdout
    if saved:
        scribe.save(50)
        name = "step-00000050.a1.l1-00000000"
        (scribe.run.checkpoints / name).mkdir()
    result = shell(*words, "tiny-gpt")
    assert " ended unexpectedly: none of its processes is left on this mach" in result.stdout
    place = "the last checkpoint" if saved else "the start"
    assert f"to continue from {place}: slurm-forge run tiny-gpt" in result.stdout
    assert "running" not in result.stdout
    told = json.loads(shell(words[0], "tiny-gpt", "--json").stdout)
    assert (told["status"], told["words"][:20]) == ("stopped", "ended unexpectedly: ")
    assert json.loads(shell("status", "--json").stdout)["runs"][0]["status"] == "stopped"


def test_a_run_that_was_started_here_in_another_way_is_not_said_to_be_gone(
    shell: Shell, scribe: Scribe
) -> None:
    with hold_run_lock(scribe.run) as presence:
        presence.name("local-7")
    scribe.now = time.time() - 20
    scribe.begin(job="local-8", via="submitit local")
    scribe.resume(0)
    assert "running: training\n" in shell("status", "tiny-gpt").stdout
