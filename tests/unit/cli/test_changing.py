"""``extend`` and ``change``: the job of a run that exists, wherever it is cut off."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from dataclasses import replace

import pytest

from slurm_forge.cli.observe.run_reading import gather
from slurm_forge.cli.run_choice import site_places
from slurm_forge.errors import SlurmCommandError
from slurm_forge.journal import RunStatus, fold, read_journal
from slurm_forge.journal import events as ev
from slurm_forge.launch.requeue import change as changing
from slurm_forge.launch.submit.submission import create_run, job_script, own_script, payload
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import JobState
from slurm_forge.spec import load_job
from slurm_forge.spec.run_file import RunFile, read_run_file
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.cli.conftest import PretendSlurm, Shell
from tests.unit.cli.test_checkpoints import Checkpoints
from tests.unit.report.journals import Scribe

JOB = """\
name: tiny-gpt
entry: tiny:train
args: {max_steps: 400, lr: 0.1, batch_size: 32}
resources: {partition: long, time: "00:30:00"}
"""
WAITS = JobRecord(
    job_id=8812301, name="x", state=JobState.PENDING, state_text="PENDING", priority=7
)


@pytest.fixture
def trained(shell: Shell, scribe: Scribe) -> Scribe:
    """A run of 400 steps with a batch of 32, whose first attempt still runs."""
    (shell.folder / "train.yaml").write_text(JOB)
    (shell.folder / "tiny.py").write_text(
        "def train(run, max_steps, lr, batch_size, seq=1):\n    raise SystemExit('imported')\n"
    )
    site = site_places().load("generic").site
    job = load_job(shell.folder / "train.yaml")
    create_run(job, runs=shell.folder / "made", site=site, submitted_from=shell.folder)
    made = RunDirectory.at(shell.folder / "made" / "tiny-gpt")
    scribe.run.spec_file.write_bytes(made.spec_file.read_bytes())
    scribe.submitted()
    scribe.begin()
    scribe.later(14).write(
        "rank0",
        ev.Resumed(step=0, checkpoint=None, world_size=1, until=400, global_batch=32),
    )
    scribe.train(399, 400)
    scribe.save(400)
    return scribe


@pytest.fixture
def finished(trained: Scribe) -> Scribe:
    trained.run.mark_done(400, 1)
    trained.write("supervisor", ev.Finished(step=400))
    trained.end("finished")
    return trained


@pytest.fixture
def held(trained: Scribe) -> Scribe:
    trained.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    trained.end("hold")
    return trained


def told(scribe: Scribe) -> list[ev.JobChanged]:
    records, damage = read_journal(scribe.run)
    assert not damage
    return [each.event for each in records if isinstance(each.event, ev.JobChanged)]


def file_of(scribe: Scribe) -> RunFile:
    return read_run_file(scribe.run.spec_file)


def status(scribe: Scribe) -> RunStatus:
    return fold(read_journal(scribe.run)[0]).status


# -- extend ---------------------------------------------------------------------------------------


def test_a_finished_run_goes_on(shell: Shell, finished: Scribe, slurm: PretendSlurm) -> None:
    before = finished.run.spec_file.read_bytes()
    result = shell("extend", "tiny-gpt", "--set", "args.max_steps=800")
    assert result.exit_code == 0, result.stderr
    assert "args.max_steps 400 → 800" in result.stdout
    assert "the finished run continues from step 400" in result.stdout
    assert "tiny-gpt: changed; submitted as job 8812301." in result.stdout
    assert not finished.run.is_done()
    assert len(slurm.submitted) == 1
    assert status(finished) is RunStatus.SUBMITTED
    assert file_of(finished).job.args["max_steps"] == 800
    assert finished.run.revision(1).read_bytes() == before
    (event,) = told(finished)
    assert (event.verb, event.step, event.reopened) == ("extend", 400, True)
    assert [str(each) for each in event.changes] == ["args.max_steps 400 → 800"]


def test_explain_and_status_tell_it(shell: Shell, finished: Scribe, slurm: PretendSlurm) -> None:
    shell("extend", "tiny-gpt", "--set", "args.max_steps=800", "--set", "resources.time=2h")
    explained = shell("explain", "tiny-gpt").stdout
    science, _, beside = explained.partition("Changes that affect your results")[2].partition(
        "Other changes"
    )
    assert "args.max_steps 400 → 800 from step 400 on (extend" in science
    assert "resources.time 00:30:00 → 02:00:00" in beside
    assert "resources.time" not in science
    assert "revised     args.max_steps 400 → 800" in shell("status", "tiny-gpt").stdout


def test_the_job_of_a_finished_run_is_given_time_to_end(
    shell: Shell, finished: Scribe, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = replace(WAITS, state=JobState.COMPLETING, state_text="COMPLETING")
    states = iter([ends, ends, replace(ends, state=JobState.COMPLETED)])
    last = replace(ends, state=JobState.COMPLETED)
    monkeypatch.setattr(slurm, "show_job", lambda job: next(states, last))
    monkeypatch.setattr(changing, "_LOOK_EVERY_S", 0.0)
    result = shell("extend", "tiny-gpt", "--set", "args.max_steps=800")
    assert result.exit_code == 0, result.stderr
    assert len(slurm.submitted) == 1


def test_a_job_that_does_not_end_is_told(
    shell: Shell, finished: Scribe, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.jobs["8812301"] = replace(WAITS, state=JobState.COMPLETING, state_text="COMPLETING")
    monkeypatch.setattr(changing, "_PATIENCE_S", 0.0)
    result = shell("extend", "tiny-gpt", "--set", "args.max_steps=800")
    assert result.exit_code == 2
    assert "job 8812301 has not ended yet (COMPLETING)" in result.stderr
    assert finished.run.is_done()
    assert not told(finished)


def test_a_refused_submission_says_that_the_change_was_made(
    shell: Shell, finished: Scribe, slurm: PretendSlurm
) -> None:
    slurm.submit_error = SlurmCommandError(("sbatch",), 1, "invalid account")
    result = shell("extend", "tiny-gpt", "--set", "args.max_steps=800")
    assert result.exit_code == 2
    assert "only the submission did not work" in result.stderr
    assert file_of(finished).job.args["max_steps"] == 800
    slurm.submit_error = None
    assert shell("requeue", "tiny-gpt").exit_code == 0
    assert len(slurm.submitted) == 1


def test_two_who_change_it_at_once_do_not_undo_each_other(
    shell: Shell, finished: Scribe, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = file_of(finished)
    shell("extend", "tiny-gpt", "--set", "args.max_steps=800", "--no-submit")
    monkeypatch.setattr("slurm_forge.spec.run_file.read_run_file", lambda path: old)
    result = shell("change", "tiny-gpt", "--set", "args.lr=1")
    assert result.exit_code == 2
    assert "tiny-gpt was changed by another command" in result.stderr
    assert file_of(finished).job.args == {"max_steps": 800, "lr": 0.1, "batch_size": 32}


def test_the_steps_of_a_run_are_those_it_is_to_make(
    shell: Shell, finished: Scribe, slurm: PretendSlurm
) -> None:
    assert "400 of 400" in shell("status", "tiny-gpt").stdout
    shell("extend", "tiny-gpt", "--set", "args.max_steps=800", "--no-submit")
    assert "400 of 800" in shell("status", "tiny-gpt").stdout


def test_without_submitting_the_run_rests(
    shell: Shell, finished: Scribe, slurm: PretendSlurm
) -> None:
    result = shell("extend", "tiny-gpt", "--set", "args.max_steps=800", "--no-submit")
    assert "to continue: slurm-forge requeue tiny-gpt" in result.stdout
    assert not slurm.submitted
    assert status(finished) is RunStatus.STOPPED
    assert shell("requeue", "tiny-gpt").exit_code == 0
    assert status(finished) is RunStatus.SUBMITTED


def test_extend_refers_to_change(shell: Shell, finished: Scribe, slurm: PretendSlurm) -> None:
    result = shell("extend", "tiny-gpt", "--set", "args.lr=0.2")
    assert result.exit_code == 2
    assert "args.lr 0.1 → 0.2 is not just an extension" in result.stderr
    assert "slurm-forge change tiny-gpt" in result.stderr
    assert finished.run.is_done()
    assert not told(finished)


def test_extend_knows_the_default_of_an_argument_that_the_job_does_not_set(
    shell: Shell, finished: Scribe, slurm: PretendSlurm
) -> None:
    result = shell("extend", "tiny-gpt", "--set", "args.seq=1")
    assert "args.seq not set → 1 is not just an extension of the run" in result.stderr
    result = shell("extend", "tiny-gpt", "--set", "args.seq=2")
    assert result.exit_code == 0, result.stderr


def test_arguments_are_those_of_the_code_that_the_run_keeps(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=shell.folder, check=True)
    assert shell("requeue", "tiny-gpt", "--code", "new").exit_code == 0
    held.begin()
    held.incident(Cause.APP_ERROR, Action.HOLD, rung=None)
    held.end("hold")
    (shell.folder / "tiny.py").write_text(
        "def train(run, max_steps, lr, batch_size, other=1):\n    pass\n"
    )
    result = shell("change", "tiny-gpt", "--set", "args.other=2", "--no-submit")
    assert "the function has no parameter 'other'" in result.stderr
    result = shell("change", "tiny-gpt", "--set", "args.seq=2", "--no-submit")
    assert result.exit_code == 0, result.stderr
    shutil.rmtree(held.run.code_pool)
    result = shell("change", "tiny-gpt", "--set", "args.seq=3", "--no-submit")
    assert "the code of this run is not in" in result.stderr


class CutOff(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("where", ["_tell", "write_atomic", "note", "reopen"])
def test_whatever_is_cut_off_is_completed_by_the_same_command(
    shell: Shell,
    finished: Scribe,
    slurm: PretendSlurm,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise CutOff

    with monkeypatch.context() as patched:
        owner = RunDirectory if where == "reopen" else changing
        patched.setattr(owner, where, gone)
        with pytest.raises(CutOff):
            shell("extend", "tiny-gpt", "--set", "args.max_steps=800")
    # Until then it is finished, as far as whoever starts it is concerned, and readable.
    assert finished.run.is_done()
    file_of(finished)
    assert not slurm.submitted
    result = shell("extend", "tiny-gpt", "--set", "args.max_steps=800")
    assert result.exit_code == 0, result.stderr
    assert not finished.run.is_done()
    assert len(slurm.submitted) == 1
    assert [str(c) for each in told(finished) for c in each.changes] == ["args.max_steps 400 → 800"]
    assert [each.number for each in file_of(finished).revisions] == [1]
    assert status(finished) is RunStatus.SUBMITTED


def test_the_next_start_tells_of_a_change_that_was_cut_off(
    shell: Shell, held: Scribe, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise CutOff

    with monkeypatch.context() as patched:
        patched.setattr(changing, "_tell", gone)
        with pytest.raises(CutOff):
            shell("change", "tiny-gpt", "--set", "args.lr=0.2")
    assert not told(held)
    for _ in range(2):  # and only once
        records, _ = read_journal(held.run)
        changing.report_revisions(held.run, file_of(held), fold(records))
        assert [str(c) for each in told(held) for c in each.changes] == ["args.lr 0.1 → 0.2"]
    assert "args.lr 0.1 → 0.2" in shell("explain", "tiny-gpt").stdout


def test_the_same_values_change_nothing(
    shell: Shell, finished: Scribe, slurm: PretendSlurm
) -> None:
    result = shell("extend", "tiny-gpt", "--set", "args.max_steps=400")
    assert result.exit_code == 2
    assert "has these values already" in result.stderr
    assert "It is finished.  To train further: slurm-forge extend tiny-gpt" in result.stderr
    assert finished.run.is_done()
    assert not told(finished)


def test_a_run_of_this_machine_is_changed_and_left_to_it(
    shell: Shell, finished: Scribe, slurm: PretendSlurm
) -> None:
    finished.begin(job="local-77", via="submitit local")
    finished.write("supervisor", ev.Finished(step=400))
    finished.end("finished")
    result = shell("extend", "tiny-gpt", "--set", "args.max_steps=800")
    assert result.exit_code == 0, result.stderr
    assert "to continue: slurm-forge run tiny-gpt" in result.stdout
    assert not slurm.submitted
    assert not finished.run.is_done()


# -- change ---------------------------------------------------------------------------------------


def test_a_held_run_goes_on_with_other_values(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    words = ["--set", "args.lr=1e-2", "--set", "args.batch_size=64", "--set", "resources.nodes=4"]
    result = shell("change", "tiny-gpt", *words, "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [(each["key"], each["affects"]) for each in answer["changes"]] == [
        ("args.lr", "science"),
        ("args.batch_size", "science"),
        ("global_batch", "science"),
        ("resources.nodes", "resources"),
    ]
    assert answer["job"] == "8812301"
    assert any("ranks 1 → 4" in each for each in answer["consequences"])
    script = slurm.submitted[0][0].read_text()
    assert "#SBATCH --nodes=4" in script


def test_a_dry_run_changes_nothing(shell: Shell, held: Scribe, slurm: PretendSlurm) -> None:
    before = held.run.spec_file.read_bytes()
    result = shell("change", "tiny-gpt", "--set", "args.lr=1e-2", "--set", "seed=4", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "may affect your results:\n  args.lr 0.1 → 0.01\n  seed 0 → 4\n" in result.stdout
    assert "the samples come in another order" in result.stdout
    assert "dry run: nothing was changed." in result.stdout
    assert held.run.spec_file.read_bytes() == before
    assert not told(held)
    assert not slurm.submitted


def test_a_run_that_trains_is_left_alone(
    shell: Shell, trained: Scribe, slurm: PretendSlurm
) -> None:
    slurm.jobs["8812301"] = replace(WAITS, state=JobState.RUNNING, state_text="RUNNING")
    before = trained.run.spec_file.read_bytes()
    result = shell("change", "tiny-gpt", "--set", "args.lr=1e-2")
    assert result.exit_code == 2
    assert "slurm-forge stop tiny-gpt" in result.stderr
    assert trained.run.spec_file.read_bytes() == before
    assert not told(trained)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["resources.nodes=4"], "continues from step 400, and ends there: none of this makes it"),
        (["args.max_steps=500"], "the finished run continues from step 400\n"),
        (["checkpoint.fallback=/nowhere/x/y"], "on this machine / can't be written to by you"),
        (["checkpoint.fallback=/dev/null/x"], "on this machine /dev/null is not a directory"),
    ],
)
def test_what_follows_is_told_before(
    shell: Shell,
    finished: Scribe,
    slurm: PretendSlurm,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != "/")
    settings = (word for each in words for word in ("--set", each))
    assert told in shell("change", "tiny-gpt", *settings, "--dry-run").stdout


def test_checkpoints_that_are_gone_are_told(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    words = ("change", "tiny-gpt", "--set", "seed=1", "--dry-run")
    assert "all checkpoints of tiny-gpt are gone" in shell(*words).stdout
    (held.run.checkpoints / "step-00000400.a1.l1-00000000").mkdir()
    assert "are gone" not in shell(*words).stdout


def test_the_ranks_of_a_run_of_this_machine_are_those_of_one_node(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    held.begin(job="local-77", via="submitit local")
    held.end("hold")
    words = ("--set", "resources.nodes=3", "--set", "resources.tasks_per_node=2", "--dry-run")
    assert "ranks 1 → 2" in shell("change", "tiny-gpt", *words).stdout
    held.run.spec_file.write_text(file_of(held).model_copy(update={"ranks": 4}).to_yaml())
    assert "ranks 4 → 2" in shell("change", "tiny-gpt", *words).stdout


def test_what_lies_in_an_earlier_fallback_folder_stays_part_of_the_run(
    shell: Shell, slurm: PretendSlurm
) -> None:
    first, second = shell.folder / "first", shell.folder / "second"
    made = Checkpoints(shell.folder / "runs", f"{{fallback: {first}}}")
    file = read_run_file(made.run.spec_file).model_copy(update={"fallback_name": "tiny-gpt-1a2b"})
    made.run.spec_file.write_text(file.to_yaml())
    (shell.folder / "tiny.py").write_text("def train(run):\n    pass\n")
    name = str(made.save(100))
    made.hold()
    (first / "tiny-gpt-1a2b").mkdir(parents=True, mode=0o700)
    (made.run.checkpoints / name).rename(first / "tiny-gpt-1a2b" / name)
    for place, earlier in ((second, first), (first, second), ("null", first)):
        words = ("--set", f"checkpoint.fallback={place}", "--no-submit")
        result = shell("change", "tiny-gpt", *words)
        assert result.exit_code == 0, result.stderr
        file = read_run_file(made.run.spec_file)
        assert str(earlier / "tiny-gpt-1a2b") in file.old_fallbacks
        assert str(file.fallback) not in file.old_fallbacks
        assert name in shell("checkpoints", "list", "tiny-gpt", "--json").stdout
        assert [each.step for each in gather(made.run).on_disk or ()] == [100]
    result = shell("fork", "tiny-gpt", "--name", "child", "--no-submit")
    assert result.exit_code == 0, result.stderr
    assert read_run_file(made.run.path.parent / "child" / "run.yaml").old_fallbacks == ()


def test_a_job_that_waits_is_held_meanwhile(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    slurm.jobs["8812301"] = WAITS
    result = shell("change", "tiny-gpt", "--set", "args.lr=1e-2")
    assert result.exit_code == 0, result.stderr
    assert slurm.held == ["8812301"]
    assert slurm.released == ["8812301"]
    assert not slurm.submitted
    assert "released job 8812301" in result.stdout


def test_a_full_disk_is_told_with_the_job_that_waits(
    shell: Shell, held: Scribe, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    slurm.jobs["8812301"] = WAITS
    monkeypatch.setattr(changing, "write_atomic", full)
    result = shell("change", "tiny-gpt", "--set", "args.lr=1e-2")
    assert result.exit_code == 2
    assert "No space left on device; a job of tiny-gpt that waited does not start" in result.stderr
    assert "slurm-forge requeue tiny-gpt" in result.stderr
    assert file_of(held).job.args["lr"] == 0.1
    held.begin(job="local-77", via="submitit local")
    result = shell("change", "tiny-gpt", "--set", "args.lr=1e-2")
    assert "No space left on device\n" in result.stderr, "no job of Slurm waits"
    assert "slurm-forge run tiny-gpt" in result.stderr


def test_a_job_that_starts_meanwhile_is_left_alone(
    shell: Shell, held: Scribe, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.jobs["8812301"] = WAITS

    def starts(job: str) -> None:
        slurm.jobs[job] = replace(WAITS, state=JobState.RUNNING, state_text="RUNNING")

    monkeypatch.setattr(slurm, "hold", starts)
    result = shell("change", "tiny-gpt", "--set", "args.lr=1e-2")
    assert result.exit_code == 2
    assert "runs as job 8812301" in result.stderr
    assert not told(held)


def test_a_job_with_another_batch_script_is_submitted_anew(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    slurm.jobs["8812301"] = replace(WAITS, priority=0)
    result = shell("change", "tiny-gpt", "--set", "resources.nodes=4")
    assert result.exit_code == 0, result.stderr
    assert slurm.cancelled == ["8812301"]
    assert not slurm.released
    assert len(slurm.submitted) == 1
    assert "job 8812301, which waited with the old batch script, is cancelled" in result.stdout


def test_the_batch_size_is_said_where_no_argument_shows_it(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    result = shell("change", "tiny-gpt", "--set", "args.seq=2", "--global-batch", "64")
    assert result.exit_code == 0, result.stderr
    (event,) = told(held)
    assert "global_batch 32 → 64" in map(str, event.changes)
    assert "begins at the sample after the last one consumed" in result.stdout


def test_the_batch_size_may_change_twice_before_the_next_start(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    for size in ("64", "96"):
        result = shell("change", "tiny-gpt", "--set", f"args.batch_size={size}", "--no-submit")
        assert result.exit_code == 0, result.stderr
    batches = [str(c) for c in file_of(held).changes or () if c.key == "global_batch"]
    assert batches == ["global_batch 32 → 64", "global_batch 64 → 96"]


def test_a_run_without_a_batch_size_has_none_to_change(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    other = Scribe(shell.folder / "runs", "other", held.run.spec_file.read_bytes())
    other.submitted()
    result = shell("change", "other", "--global-batch", "64")
    assert result.exit_code == 2
    assert "has not trained with run.batches yet" in result.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--set", "name=other"], "slurm-forge fork tiny-gpt --name other"),
        (["--set", "args.nonsense=1"], "nonsense"),
        (["--set", "argz.lr=1"], 'did you mean "args"'),
        (["--set", "resources.nodes=0"], "resources.nodes"),
        ([], "--set: nothing is given to change"),
    ],
)
def test_what_makes_no_sense_is_refused_first(
    shell: Shell, held: Scribe, slurm: PretendSlurm, words: list[str], why: str
) -> None:
    before = held.run.spec_file.read_bytes()
    result = shell("change", "tiny-gpt", *words)
    assert result.exit_code == 2
    assert why in result.stderr
    assert held.run.spec_file.read_bytes() == before
    assert not slurm.submitted
    assert not told(held)


def test_a_run_whose_script_is_the_users_is_changed_there(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    own_script(held.run).touch()
    result = shell("change", "tiny-gpt", "--set", "args.lr=1")
    assert result.exit_code == 2
    assert "start the script again" in result.stderr


def test_of_a_run_of_submitit_what_is_not_in_its_script_can_change(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    payload(held.run).touch()
    job_script(held.run).write_text("#!/bin/bash\n")
    result = shell("change", "tiny-gpt", "--set", "resources.nodes=2")
    assert result.exit_code == 2
    assert "slurm-forge fork tiny-gpt" in result.stderr
    assert not told(held)
    result = shell("change", "tiny-gpt", "--set", "args.lr=1e-2")
    assert result.exit_code == 0, result.stderr
    assert slurm.submitted[0][0].read_text() == "#!/bin/bash\n", "the script that is kept"


def test_submitting_a_run_that_exists_names_the_verbs(
    shell: Shell, held: Scribe, slurm: PretendSlurm
) -> None:
    result = shell("submit", "train.yaml")
    assert result.exit_code == 2
    for verb in ("requeue", "extend", "change", "fork"):
        assert f"slurm-forge {verb}" in result.stderr
