"""``watch`` as a person or cron starts it: said once, counted by its exit status, kept private."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from slurm_forge.cli.main import application
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import AttemptStarted, DecisionTaken, UserAsked
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec import job_from_mapping
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action, Decision
from slurm_forge.vocabulary.plan import RecoveryPlan

CONFIG = "Configuration data as of now\nClusterName = hill\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs, and commands of a Slurm that counts what it is asked."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("squeue", "cat queue"), ("scontrol", f"printf '{CONFIG}'"), ("sacct", "")):
        path = programs / name
        path.write_text(f"#!/bin/sh\ncd {tmp_path}; echo $0 >> asked\n{text}\n")
        path.chmod(0o700)
    (tmp_path / "queue").write_text("")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs = tmp_path / "runs"
    runs.mkdir()
    return runs


def run_of(folder: Path, name: str) -> RunDirectory:
    job = job_from_mapping({"name": name, "entry": "train:main"})
    run, _ = create_run(
        job, runs=folder, site=find_site("generic"), submitted_from=folder, python=sys.executable
    )
    return run


def held(folder: Path, name: str, job: str) -> RunDirectory:
    run = run_of(folder, name)
    journal = JournalWriter(run, attempt=1, writer="supervisor", launch=1)
    journal.write(AttemptStarted(job=job, restart_count=0, nodes=("n1",), host="n1", via="sbatch"))
    decision = Decision(
        incident_id="1.1",
        cause=Cause.HANG,
        action=Action.HOLD,
        reason="hang: three times at step 7",
        plan=RecoveryPlan(),
        rung=0,
    )
    journal.write(DecisionTaken(decision=decision))
    journal.close()
    return run


def watch(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(application(), ["watch", "--once", "--runs", str(folder), *words])


def test_what_is_new_is_said_once(folder: Path) -> None:
    run = held(folder, "tiny", "42")
    first = watch(folder)
    assert first.exit_code == 1
    assert "held: hang: three times at step 7" in first.stdout
    assert "slurm-forge requeue" in first.stdout
    second = watch(folder)
    assert (second.exit_code, second.stdout) == (0, "")
    journal = JournalWriter(run, attempt=1, writer="cli", launch=1 << 30)
    journal.write(UserAsked(verb="requeue", user="me"))
    journal.close()
    (folder.parent / "queue").write_text("42|42|PENDING|Priority|N/A\n")
    assert watch(folder).stdout == ""
    (folder.parent / "queue").write_text("42|42|PENDING|JobHeldAdmin|N/A\n")
    third = watch(folder)
    assert "held by an administrator" in third.stdout, third.stderr
    assert third.exit_code == 1


def test_a_torn_memory_is_no_error_and_a_foreign_one_is_refused(folder: Path) -> None:
    held(folder, "tiny", "42")
    assert watch(folder).exit_code == 1
    (memory,) = (folder.parent / "state" / "slurm_forge" / "watch").glob("*.json")
    assert memory.stat().st_mode & 0o777 == 0o600
    memory.write_text('{"v": 1, "told"')
    assert watch(folder).exit_code == 1, "told again"
    for broken in ("[]", '{"v": 9}', '{"v": 1, "told": {"a": 3}}', "\x00"):
        memory.write_text(broken)
        assert watch(folder).exit_code == 1
    memory.chmod(0o666)
    refused = watch(folder)
    assert refused.exit_code == 2
    assert "can be written by other users" in refused.output


def test_a_hook_gets_what_is_new_and_its_failure_is_told(folder: Path) -> None:
    held(folder, "tiny", "42")
    held(folder, "big", "43")
    out, hook = folder.parent / "out", folder.parent / "hook"
    hook.write_text(f"#!/bin/sh\ncat >> {out}; echo noise; echo no net >&2; exit 4\n")
    hook.chmod(0o700)
    told = watch(folder, "--hook", str(hook))
    assert told.exit_code == 1
    assert "the hook" in told.output and "ended with 4: no net" in told.output
    body = json.loads(out.read_text())
    assert body["schema"] == 1
    assert {one["kind"] for one in body["findings"]} == {"held"}
    assert {one["job"] for one in body["findings"]} == {"42", "43"}
    again = watch(folder, "--hook", str(hook))
    assert again.exit_code == 0
    assert json.loads(out.read_text()) == body, "called once"
    assert watch(folder, "--hook", "/no/such/program").exit_code == 2


def test_json_has_everything_and_one_question_is_asked(folder: Path) -> None:
    for number in range(20):
        held(folder, f"r{number}", str(50 + number))
    body = json.loads(watch(folder, "--json").stdout)
    assert (body["schema"], body["runs"], len(body["findings"])) == (1, 20, 20)
    assert all(one["new"] and one["person"] for one in body["findings"])
    asked = (folder.parent / "asked").read_text().split()
    assert [Path(each).name for each in asked] == ["scontrol", "squeue"]
    assert not any(one["new"] for one in json.loads(watch(folder, "--json").stdout)["findings"])


def test_without_slurm_it_says_so(folder: Path) -> None:
    held(folder, "tiny", "42")
    squeue = folder.parent / "bin" / "squeue"
    words = "squeue: error: Unable to contact slurm controller"
    squeue.write_text(f"#!/bin/sh\necho '{words}' >&2; exit 1\n")
    told = watch(folder)
    assert "Unable to contact slurm controller" in told.output
    assert "held" in told.output, "what the journals say is told all the same"
    assert told.exit_code == 1
    again = watch(folder)
    assert (again.exit_code, again.stdout) == (2, ""), "nothing new is not: nothing is wrong"


def test_a_folder_that_is_not_there_is_no_quiet_success(folder: Path) -> None:
    told = watch(folder / "elsewhere")
    assert told.exit_code == 2
    assert "nothing would be watched\n  Give the folder of runs" in told.stderr
    assert watch(folder).exit_code == 0, "an empty one is: runs come later"


def test_another_watcher_that_takes_long_does_not_end_the_watch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held(folder, "tiny", "42")
    monkeypatch.setattr("slurm_forge.cli.observe.watch._MINUTE_S", 0.1)
    assert watch(folder).exit_code == 1  # it makes the lock file
    (lock,) = (folder.parent / "state").rglob("*.lock")
    other = os.open(lock, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    looks = 0

    def rest(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            os.close(other)
            held(folder, "big", "43")
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("slurm_forge.cli.observe.watch._rest", rest)
    told = CliRunner().invoke(application(), ["watch", "--runs", str(folder)])
    assert told.exit_code == 0 and "big: held" in told.stdout
    assert told.stderr.count("check failed") == 2
    assert watch(folder).exit_code == 0


def test_one_run_by_name(folder: Path) -> None:
    held(folder, "tiny", "42")
    held(folder, "big", "43")
    told = watch(folder, "tiny")
    assert "tiny" in told.stdout and "big" not in told.stdout
    assert "big" in watch(folder).stdout, "the other one is news still"
    assert watch(folder, "nobody").exit_code == 2


def test_a_controller_that_does_not_answer_is_asked_less_and_less_often(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held(folder, "tiny", "42")
    squeue = folder.parent / "bin" / "squeue"
    good = squeue.read_text()
    squeue.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    squeue.chmod(0o700)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 7:
            squeue.write_text(good)
        if len(pauses) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr("slurm_forge.cli.observe.watch._rest", sleep)
    words = ["watch", "--runs", str(folder), "--every", "50s"]
    told = CliRunner().invoke(application(), words)
    assert told.exit_code == 0
    assert pauses == [100, 200, 400, 800, 900, 900, 900, 50]
    assert told.stdout.count("held: hang") == 1
    assert [line.partition(":")[0] for line in told.stderr.splitlines()] == [
        "Slurm's queue could not be queried",
        "  See whether `scontrol ping` answers, and try again when it does.",
        "Slurm's queue answers again",
    ], "each change is told once, with what to do"
