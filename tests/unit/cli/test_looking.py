"""``status`` and ``explain`` as commands: which run, which output, which exit status."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from slurm_forge.cli import looking
from slurm_forge.journal import events as ev
from tests.unit.cli.conftest import Shell
from tests.unit.report.journals import Scribe


def trained(scribe: Scribe) -> None:
    scribe.now = time.time() - 700
    scribe.begin()
    scribe.resume(0)
    scribe.train(1, 50)
    scribe.save(50)


def test_status_shows_the_screen(shell: Shell, scribe: Scribe) -> None:
    trained(scribe)
    result = shell("status", "tiny-gpt")
    assert result.exit_code == 0
    assert "status      running: training\n" in result.stdout
    assert "step        50 of 400 (12.5 %)\n" in result.stdout
    assert result.stderr == ""


def test_status_and_explain_for_programs(shell: Shell, scribe: Scribe) -> None:
    trained(scribe)
    status = json.loads(shell("status", "tiny-gpt", "--json").stdout)
    assert (status["step"], status["total_steps"], status["status"]) == (50, 400, "running")
    story = json.loads(shell("explain", "tiny-gpt", "--json").stdout)
    assert [attempt["number"] for attempt in story["attempts"]] == [1]


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
    assert f"damaged line left out: {path.name}, line 1:" in result.stdout
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


def test_a_journal_of_somebody_else_is_not_believed(shell: Shell, scribe: Scribe) -> None:
    trained(scribe)
    path = next(scribe.run.journal.glob("1-rank0-*"))
    path.chmod(0o666)
    result = shell("status", "tiny-gpt")
    assert result.exit_code == 2
    assert "can be written by other users" in result.stderr


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

    monkeypatch.setattr(time, "sleep", later)
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


def test_follow_and_json_exclude_each_other(shell: Shell, scribe: Scribe) -> None:
    assert shell("status", "tiny-gpt", "--follow", "--json").exit_code == 2


def test_a_run_that_is_a_file(shell: Shell, tmp_path: Path) -> None:
    result = shell("status", "./train.yaml")
    assert result.exit_code == 2
    assert "holds no run" in result.stderr
