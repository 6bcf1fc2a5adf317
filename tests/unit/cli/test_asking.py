"""``requeue``, ``reconcile``, ``stop`` and ``save``: what a person asks of a run."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from datetime import timedelta

import pytest

from slurm_forge.cli.run_choice import site_places
from slurm_forge.errors import SlurmUnreachableError
from slurm_forge.journal import RunStatus, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.launch.attempt.run_lock import hold_run_lock
from slurm_forge.launch.requeue import change as changing
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.slurm.text.answers import RequeueAnswer
from slurm_forge.spec import load_job
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.cli.conftest import PretendSlurm, Shell
from tests.unit.report.journals import Scribe


@pytest.fixture
def held(shell: Shell, scribe: Scribe) -> Scribe:
    """A run that was held after its first attempt."""
    job = load_job(shell.folder / "train.yaml")
    site = site_places().load("generic").site
    create_run(job, runs=shell.folder / "made", site=site, submitted_from=shell.folder)
    made = RunDirectory.at(shell.folder / "made" / "tiny-gpt")
    scribe.run.spec_file.write_bytes(made.spec_file.read_bytes())
    scribe.begin()
    scribe.resume(0)
    scribe.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    scribe.end("hold")
    return scribe


def asked(scribe: Scribe) -> list[str]:
    records, _ = read_journal(scribe.run)
    return [r.event.verb for r in records if isinstance(r.event, ev.UserAsked)]


def test_a_held_run_is_submitted_again(shell: Shell, held: Scribe, slurm: PretendSlurm) -> None:
    held.run.stop_file.touch()
    result = shell("requeue", "tiny-gpt")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "tiny-gpt: submitted as job 8812301.   follow: slurm-forge status tiny-gpt\n"
    )
    assert len(slurm.submitted) == 1
    assert not held.run.stop_file.exists()
    assert asked(held) == ["requeue"]


def test_a_run_takes_the_present_code_where_a_person_wants_it(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=shell.folder, check=True)
    (shell.folder / ".gitignore").write_text("runs\nmade\n.local\n.cache\n.config\n")
    result = shell("requeue", "tiny-gpt", "--code", "new")
    assert result.exit_code == 0, result.stderr
    file = read_run_file(held.run.spec_file)
    assert file.code is not None
    assert f"code the files in {shell.folder} → {file.code}" in result.stderr
    (shell.folder / "tiny.py").write_text("def train(run): ...\n")
    held.begin()
    held.resume(0)
    held.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    held.end("hold")
    result = shell("requeue", "tiny-gpt", "--code", "new")
    assert "(changed: tiny.py)" in result.stderr
    assert len(slurm.submitted) == 2
    assert asked(held) == ["requeue"] * 2
    assert "(changed: tiny.py) (requeue --code new" in shell("explain", "tiny-gpt").stdout
    held.begin()
    held.resume(0)
    (shell.folder / "tiny.py").write_text("def train(run): pass\n")
    slurm.jobs["8812301"] = JobRecord(
        job_id=8812301, name="x", state=JobState.RUNNING, state_text="RUNNING"
    )
    before = read_run_file(held.run.spec_file)
    result = shell("requeue", "tiny-gpt", "--code", "new")
    assert result.exit_code == 2
    assert "a run that is training can't be changed" in result.stderr
    assert read_run_file(held.run.spec_file) == before
    slurm.jobs.clear()  # its node went down, and Slurm has forgotten it
    assert shell("requeue", "tiny-gpt", "--code", "new").exit_code == 0
    assert read_run_file(held.run.spec_file).code != before.code


def test_a_job_that_waits_takes_the_present_code(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=shell.folder, check=True)
    assert shell("requeue", "tiny-gpt").exit_code == 0
    slurm.jobs["8812301"] = JobRecord(
        job_id=8812301, name="x", state=JobState.PENDING, state_text="PENDING"
    )
    result = shell("requeue", "tiny-gpt", "--code", "new")
    assert result.exit_code == 0, result.stderr
    assert (slurm.held, slurm.released) == (["8812301"], ["8812301"])
    assert read_run_file(held.run.spec_file).code is not None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--site", "nowhere"), "nowhere"),
        (("--mem", "much"), "much"),
    ],
)
def test_the_code_stays_where_something_else_is_refused(
    shell: Shell, held: Scribe, slurm: PretendSlurm, words: tuple[str, ...], problem: str
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=shell.folder, check=True)
    result = shell("requeue", "tiny-gpt", "--code", "new", *words)
    assert result.exit_code
    assert problem in result.stderr
    assert read_run_file(held.run.spec_file).code is None


def test_code_that_can_not_run_is_refused(shell: Shell, held: Scribe, slurm: PretendSlurm) -> None:
    subprocess.run(["git", "init", "-q"], cwd=shell.folder, check=True)
    (shell.folder / "tiny.py").write_text("def trains(run): ...\n")
    result = shell("requeue", "tiny-gpt", "--code", "new")
    assert result.exit_code == 2
    assert "train" in result.stderr
    assert not slurm.submitted
    assert read_run_file(held.run.spec_file).code is None


def test_a_local_run_takes_the_present_code_also_after_it_was_killed(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=shell.folder, check=True)
    held.begin(job="local-77", via="submitit local")  # no end was written
    result = shell("requeue", "tiny-gpt", "--code", "new")
    assert "runs the files in" in result.stderr, "there is no snapshot, and none is wanted"
    assert "imports what is there then: slurm-forge run tiny-gpt" in result.stderr
    spec = held.run.spec_file.read_text()
    held.run.spec_file.write_text(spec.replace("mode: auto", "mode: snapshot"))
    result = shell("requeue", "tiny-gpt", "--code", "new", "--mem", "4G")
    assert "is a local run" in result.stderr, "it asks Slurm for no memory"
    with hold_run_lock(held.run):
        result = shell("requeue", "tiny-gpt", "--code", "new")
    assert "is being trained already" in result.stderr
    assert read_run_file(held.run.spec_file).code is None
    result = shell("requeue", "tiny-gpt", "--code", "new", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["changed"] is True
    assert read_run_file(held.run.spec_file).code is not None
    assert "slurm-forge run tiny-gpt" in shell("requeue", "tiny-gpt", "--code", "new").stdout


def test_the_next_start_tells_of_new_code_that_was_taken_before_the_command_was_killed(
    shell: Shell, held: Scribe, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    subprocess.run(["git", "init", "-q"], cwd=shell.folder, check=True)
    with monkeypatch.context() as patched:
        patched.setattr(changing, "_tell", killed)
        assert shell("requeue", "tiny-gpt", "--code", "new").exit_code
    file = read_run_file(held.run.spec_file)
    assert file.code is not None
    assert str(file.code) not in shell("explain", "tiny-gpt").stdout.partition("Changes")[2]
    changing.report_revisions(held.run, file, fold(read_journal(held.run)[0]))
    assert str(file.code) in shell("explain", "tiny-gpt").stdout.partition("Changes")[2]


def test_a_run_that_is_alive_stays_as_it_is(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    slurm.jobs["8812301"] = JobRecord(
        job_id=8812301, name="x", state=JobState.RUNNING, state_text="RUNNING"
    )
    result = shell("requeue", "tiny-gpt")
    assert "job 8812301 is RUNNING already" in result.stdout
    assert slurm.submitted == []


def test_a_finished_run_is_not_requeued(shell: Shell, held: Scribe, slurm: PretendSlurm) -> None:
    held.run.mark_done(400, 1)
    result = shell("requeue", "tiny-gpt")
    assert result.exit_code == 2
    assert "tiny-gpt is finished" in result.stderr
    assert slurm.submitted == []


def test_a_run_of_this_machine_is_not_given_to_slurm(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    held.begin(job="local-77", via="submitit local")
    held.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    result = shell("requeue", "tiny-gpt")
    assert result.exit_code == 2
    assert "is a local run, not one of Slurm" in result.stderr
    assert "slurm-forge run" in result.stderr
    assert slurm.submitted == []


def test_reconcile_carries_an_open_intent_out(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    held.begin()
    held.incident(Cause.PREEMPTED, Action.REQUEUE)
    method = "scontrol requeue"
    held.write("supervisor", ev.RequeueIntended(job="8812301", method=method, reason="p"))
    held.write("supervisor", ev.RequeueFailed(job="8812301", method=method, reason="timed out"))
    held.end("open")
    result = shell("reconcile", "tiny-gpt")
    assert result.exit_code == 0, result.stderr
    assert fold(read_journal(held.run)[0]).open_intent is None
    assert "nothing is open" in shell("reconcile", "tiny-gpt").stdout


def test_reconcile_that_finds_no_slurm_says_that_it_is_still_open(
    shell: Shell, held: Scribe, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_forge.launch.requeue.reconcile._PATIENCE", timedelta(0))
    held.begin()
    held.write("supervisor", ev.RequeueIntended(job="8812301", method="m", reason="p"))
    slurm.outcome = RequeueAnswer.UNREACHABLE
    result = shell("reconcile", "tiny-gpt")
    assert result.exit_code == 2
    assert "not confirmed the requeue" in result.stderr


def test_stop_and_save_leave_their_files_and_say_who_asked(shell: Shell, held: Scribe) -> None:
    result = shell("stop", "tiny-gpt")
    assert result.exit_code == 0
    assert held.run.stop_file.exists()
    assert "to continue later: slurm-forge requeue tiny-gpt" in result.stdout
    assert shell("stop", "tiny-gpt").exit_code == 0  # twice is no mistake
    assert shell("save", "tiny-gpt").exit_code == 0
    assert held.run.save_file.exists()
    assert sorted(asked(held)) == ["save", "stop", "stop"]
    assert fold(read_journal(held.run)[0]).status is RunStatus.HELD


def test_stop_says_what_becomes_of_a_job_that_waits(
    shell: Shell, scribe: Scribe, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = "slurm_forge.cli.observe.surroundings.shutil.which"
    monkeypatch.setattr(which, lambda _: "/bin/scontrol")
    scribe.submitted()
    waits = "job 8812301 is in the queue: when its turn comes"
    record = JobRecord(
        job_id=8812301, name="x", state=JobState.PENDING, state_text="PENDING", priority=7
    )
    slurm.jobs["8812301"] = record
    said = shell("stop", "tiny-gpt").stdout
    assert waits in said
    assert "it ends at once without training" in said
    assert "to free the queue now: scancel 8812301." in said
    slurm.error = SlurmUnreachableError(["scontrol"], 1, "no answer")
    assert waits in shell("stop", "tiny-gpt").stdout  # by the journal
    slurm.error = None
    slurm.jobs["8812301"] = replace(record, state=JobState.RUNNING, state_text="RUNNING")
    said = shell("stop", "tiny-gpt").stdout
    assert "asked to save and stop." in said
    assert "scancel" not in said


@pytest.mark.parametrize("verb", ["stop", "save"])
def test_a_finished_run_is_asked_nothing(shell: Shell, held: Scribe, verb: str) -> None:
    held.run.mark_done(400, 1)
    result = shell(verb, "tiny-gpt")
    assert result.exit_code == 0
    assert "finished already" in result.stdout
    assert not held.run.stop_file.exists()
    assert not held.run.save_file.exists()


def test_requeue_and_reconcile_answer_as_json(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    result = shell("requeue", "tiny-gpt", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["run"], told["job"], told["changed"]) == ("tiny-gpt", "8812301", True)
    nothing = json.loads(shell("reconcile", "tiny-gpt", "--json").stdout)
    assert (nothing["text"], nothing["changed"]) == ("nothing is open", False)


def test_a_run_is_requeued_with_what_it_is_to_ask_for(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    result = shell("requeue", "tiny-gpt", "--mem", "64G", "--time", "2-00:00:00", "--exclude", "n3")
    assert result.exit_code == 0, result.stderr
    ((_, args),) = slurm.submitted
    assert "--mem=65536M" in args
    script = (held.run.submissions / "job.sbatch").read_text()
    assert "#SBATCH --exclude=n3" in script
    assert "#SBATCH --time=2-00:00:00" in script
    assert read_run_file(held.run.spec_file).job.resources.mem == 64 << 30


def test_a_wrong_value_is_told_with_its_key(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    result = shell("requeue", "tiny-gpt", "--time", "soon")
    assert result.exit_code == 2
    assert "resources.time" in result.stderr
    assert slurm.submitted == []


@pytest.mark.parametrize("verb", ["requeue", "stop", "save", "reconcile"])
def test_a_run_is_meant_by_the_id_of_its_job_too(
    shell: Shell, held: Scribe, slurm: PretendSlurm, verb: str
) -> None:
    Scribe(shell.folder / "runs", name="another").begin(job="99")
    result = shell(verb, "8812301")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("tiny-gpt: ")


def test_a_job_of_no_run_is_told_as_that(shell: Shell, held: Scribe, slurm: PretendSlurm) -> None:
    result = shell("requeue", "4711")
    assert result.exit_code == 2
    assert "has had job 4711" in result.stderr
    assert "--runs DIR" in result.stderr


def test_a_run_whose_name_is_a_number_goes_first(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    Scribe(shell.folder / "runs", name="8812301")
    assert shell("stop", "8812301").stdout.startswith("8812301: ")
