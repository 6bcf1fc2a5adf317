"""``fork``: which checkpoint, which job, and what is told; what it computes is tested elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest

from slurm_forge.journal import events as ev
from slurm_forge.journal import read_journal
from slurm_forge.launch.submit import fork as forks
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.run_file import read_run_file
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.vocabulary.trust import Trust
from tests.unit.cli.conftest import PretendSlurm, Shell
from tests.unit.cli.test_checkpoints import Checkpoints

KEEP_BEST = "{keep_best: {metric: val_loss}}"


@pytest.fixture
def made(shell: Shell, slurm: PretendSlurm) -> Checkpoints:
    """Three checkpoints of a run that was held; the one in the middle is the best."""
    made = Checkpoints(shell.folder / "runs", KEEP_BEST)
    for step, loss in ((100, 3.0), (200, 1.0), (300, 2.0)):
        name = made.save(step)
        made.scribe.write(
            "rank0", ev.CheckpointMeasured(name=str(name), metric="val_loss", value=loss)
        )
    made.judge(100, Trust.GOOD)
    made.hold()
    (shell.folder / "tiny.py").write_text("def train(run, lr=0.1):\n    pass\n")
    spec = made.run.spec_file.read_text()
    made.run.spec_file.write_text(spec.replace("/tmp", str(shell.folder)))
    return made


def child_of(made: Checkpoints, name: str = "child") -> RunDirectory:
    return RunDirectory.existing(made.run.path.parent / name)


def base_of(run: RunDirectory) -> int:
    (name,) = CheckpointStore(run.checkpoints, run.name).candidates()
    return name.step


def forked(run: RunDirectory) -> ev.Forked:
    (event,) = [r.event for r in read_journal(run)[0] if isinstance(r.event, ev.Forked)]
    return event


@pytest.mark.parametrize(
    ("word", "step"),
    [
        ("latest", 300),
        ("last", 300),
        ("next", 300),
        ("best", 200),
        ("good", 100),
        ("200", 200),
        ("step-00000100", 100),
    ],
)
def test_which_checkpoint_is_meant(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm, word: str, step: int
) -> None:
    result = shell("fork", "tiny-gpt", "--name", "child", "--from", word)
    assert result.exit_code == 0, result.stderr
    child = child_of(made)
    assert base_of(child) == step
    assert forked(child).step == step
    assert f"child: begins at step {step} of tiny-gpt\n" in result.stdout
    assert "child: submitted as job 8812301." in result.stdout
    script = slurm.submitted[0][0]
    assert script.is_relative_to(child.path)


def test_the_job_of_the_child(shell: Shell, made: Checkpoints, slurm: PretendSlurm) -> None:
    words = ["--set", "args.lr=0.2", "--fresh", "rng, optimizer", "--no-submit", "--json"]
    result = shell("fork", "tiny-gpt", "--name", "child", *words)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["fresh"] == ["optimizer", "rng"]
    assert answer["job"] == ""
    assert [each["key"] for each in answer["changes"]] == ["args.lr"]
    assert not slurm.submitted
    file = read_run_file(child_of(made).spec_file)
    assert (file.job.name, file.job.args) == ("child", {"lr": 0.2})
    assert [each.verb for each in file.revisions] == ["fork"]
    assert read_run_file(made.run.spec_file).job.name == "tiny-gpt", "the parent stays as it is"


def test_status_and_explain_name_the_parent(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    shell("fork", "tiny-gpt", "--name", "child", "--from", "200", "--fresh", "data")
    line = f"begins at step 200 of {made.run.path} (step-00000200.a1.l1-00000000), fresh: data"
    status = shell("status", "child").stdout
    assert line in status
    assert re.search(r"checkpoint +step 0, .*step-00000000", status)
    assert line in shell("explain", "child").stdout


def test_a_child_can_be_forked_and_changed_itself(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    shell("fork", "tiny-gpt", "--name", "child", "--no-submit")
    result = shell("change", "child", "--set", "args.lr=0.3", "--no-submit")
    assert result.exit_code == 0, result.stderr
    result = shell("fork", "child", "--name", "grandchild", "--no-submit")
    assert result.exit_code == 0, result.stderr
    file = read_run_file(child_of(made, "grandchild").spec_file)
    assert [each.verb for each in file.revisions] == ["fork", "change", "fork"]
    assert [str(each) for each in file.changes or ()] == ["args.lr not set → 0.3"]
    result = shell("change", "grandchild", "--set", "args.lr=0.4", "--no-submit")
    assert result.exit_code == 0, result.stderr
    records, _ = read_journal(child_of(made, "grandchild"))
    events = [r.event for r in records if isinstance(r.event, ev.JobChanged)]
    numbered = sorted((each.revision, each.verb) for each in events)
    assert numbered == [(3, "fork"), (4, "change")]


def test_a_fork_tells_what_its_parent_had_otherwise_at_that_step(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    shell("change", "tiny-gpt", "--set", "args.lr=0.2", "--no-submit")
    shell("change", "tiny-gpt", "--set", "args.lr=0.3", "--set", "seed=1", "--no-submit")
    told = shell("fork", "tiny-gpt", "--name", "early", "--from", "200", "--no-submit").stdout
    assert "args.lr not set → 0.3\n  seed 0 → 1\n" in told
    assert "args.lr not set → 0.3; seed 0 → 1 from step 200 on" in shell("explain", "early").stdout
    words = ("--from", "200", "--set", "seed=0", "--no-submit")
    told = shell("fork", "tiny-gpt", "--name", "seed", *words).stdout
    assert "seed" not in told.partition("\n")[2].partition("to start it")[0]
    told = shell("fork", "tiny-gpt", "--name", "late", "--from", "300", "--no-submit").stdout
    assert "args.lr" not in told
    assert "args.lr" not in shell("explain", "late").stdout


def test_the_batch_size_of_a_fork_can_be_changed_before_its_first_start(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    made.scribe.write(
        "rank0", ev.Resumed(step=0, checkpoint=None, world_size=1, global_batch=32), launch=1
    )
    shell("fork", "tiny-gpt", "--name", "child", "--no-submit")
    result = shell("change", "child", "--global-batch", "64", "--no-submit")
    assert result.exit_code == 0, result.stderr
    changes = read_run_file(child_of(made).spec_file).changes or ()
    assert [str(each) for each in changes] == ["global_batch 32 → 64"]


def test_submitting_does_not_make_it_anew(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    shell("fork", "tiny-gpt", "--name", "child", "--no-submit")
    (shell.folder / "train.yaml").write_text("name: child\nentry: tiny:train\n")
    result = shell("submit", "train.yaml")
    assert result.exit_code == 2
    assert "there is already a run" in result.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--from", "150"], "no checkpoint of step 150; the nearest"),
        (["--fresh", "optimiser"], 'did you mean "optimizer"'),
        (["--set", "args.nonsense=1"], "nonsense"),
        (["--name", "tiny-gpt"], "there is already something in"),
        (["--name", "no good"], "a name is 1 to 64 letters"),
        (["--set", "name=other"], "--set name=other: the new run is child by --name"),
    ],
)
def test_what_can_not_be_makes_nothing(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm, words: list[str], why: str
) -> None:
    before = sorted(made.run.path.parent.iterdir())
    result = shell("fork", "tiny-gpt", "--name", "child", *words)
    assert result.exit_code == 2
    assert why in result.stderr
    assert sorted(made.run.path.parent.iterdir()) == before
    assert not slurm.submitted


def test_a_suspect_checkpoint_is_promoted_first(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    made.judge(300, Trust.SUSPECT)
    result = shell("fork", "tiny-gpt", "--name", "child")
    assert result.exit_code == 2
    assert "is suspect: seen" in result.stderr
    assert "slurm-forge checkpoints promote tiny-gpt 300" in result.stderr


def test_a_damaged_checkpoint_leaves_nothing_behind(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    made.damage(300)
    before = sorted(made.run.path.parent.iterdir())
    result = shell("fork", "tiny-gpt", "--name", "child")
    assert result.exit_code == 2
    assert "block 70" in result.stderr
    assert sorted(made.run.path.parent.iterdir()) == before


def test_what_a_killed_fork_left_is_no_run_and_goes_with_a_later_fork(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    runs = made.run.path.parent
    with monkeypatch.context() as patched:  # as kill -9 does: nothing is cleared away
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        patched.setattr(forks, "_write_history", killed)
        assert shell("fork", "tiny-gpt", "--name", "child").exit_code
    (left,) = runs.glob(".fork-child-*")
    assert ".fork" not in shell("status").stdout
    shell("fork", "tiny-gpt", "--name", "other", "--no-submit")
    assert left.is_dir(), "it may be a fork that goes on"
    os.utime(left, (0, 0))
    shell("fork", "tiny-gpt", "--name", "third", "--no-submit")
    assert not left.exists()
    made.store.verify_manifest(made.names[300])


def test_two_forks_of_one_name_make_one_run(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell("fork", "tiny-gpt", "--name", "child", "--from", "100", "--no-submit")

    there, child = os.path.lexists, made.run.path.parent / "child"
    looks = iter([False])

    def looked_too_early(path: os.PathLike[str]) -> bool:
        return next(looks, True) if path == child else there(path)

    with monkeypatch.context() as patched:
        patched.setattr(os.path, "lexists", looked_too_early)
        result = shell("fork", "tiny-gpt", "--name", "child", "--from", "200")
    assert result.exit_code == 2
    assert "there is already something in" in result.stderr
    assert base_of(child_of(made)) == 100
    assert not list(made.run.path.parent.glob(".fork-*"))


def test_checkpoints_that_are_gone_are_told(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    shutil.rmtree(made.run.checkpoints)
    result = shell("fork", "tiny-gpt", "--name", "child")
    assert "saved step 300, but all its checkpoints are gone" in result.stderr


def test_without_a_metric_there_is_no_best_one(shell: Shell, slurm: PretendSlurm) -> None:
    made = Checkpoints(shell.folder / "runs")
    made.save(100)
    result = shell("fork", "tiny-gpt", "--name", "child", "--from", "best")
    assert result.exit_code == 2
    assert "checkpoint.keep_best" in result.stderr


def test_a_fork_of_a_run_of_this_machine_is_one_of_this_machine(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    made.scribe.begin(job="local-77", via="submitit local")
    made.scribe.end("hold")
    result = shell("fork", "tiny-gpt", "--name", "child")
    assert "to start it: slurm-forge run child" in result.stdout, result.stderr
    for verb in ("status", "explain"):
        assert "slurm-forge run child" in shell(verb, "child").stdout
        assert "slurm-forge requeue" not in shell(verb, "child").stdout
        assert "sbatch" not in shell(verb, "child").stdout
    result = shell("requeue", "child")
    assert "Continue it here: slurm-forge run child" in result.stderr
    result = shell("change", "child", "--set", "args.lr=0.3")
    assert "to continue: slurm-forge run child" in result.stdout, result.stderr
    result = shell("fork", "child", "--name", "grandchild")
    assert "to start it: slurm-forge run grandchild" in result.stdout, result.stderr
    result = shell("change", "child", "--set", "args.lr=0.3")
    assert "slurm-forge run child" in result.stderr
    assert not slurm.submitted


def test_the_schedule_of_a_fork_with_fresh_data_is_told(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    for parts, is_told in (("data", True), ("data,optimizer", False), ("rng", False)):
        words = ["fork", "tiny-gpt", "--name", f"child-{parts[-3:]}", "--fresh", parts]
        assert ("learning-rate schedules" in shell(*words).stdout) is is_told


def test_the_present_code_of_a_run_of_slurm_is_a_snapshot_also_where_there_was_none(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=shell.folder, check=True)
    for name, words, is_copied in (("live", (), False), ("copied", ("--code", "new"), True)):
        result = shell("fork", "tiny-gpt", "--name", name, "--no-submit", *words)
        assert result.exit_code == 0, result.stderr
        assert (read_run_file(child_of(made, name).spec_file).code is not None) is is_copied


def test_a_fork_keeps_the_snapshot_of_its_parent_unless_the_present_code_is_wanted(
    shell: Shell, made: Checkpoints, slurm: PretendSlurm
) -> None:
    git = ["git", "-C", str(shell.folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "tiny.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    assert shell("requeue", "tiny-gpt", "--code", "new").exit_code == 0
    made.hold()
    before = read_run_file(made.run.spec_file).code
    assert before is not None
    with (shell.folder / "tiny.py").open("a") as file:
        file.write("\nOTHER = 1\n")
    shell("fork", "tiny-gpt", "--name", "same")
    assert read_run_file(child_of(made, "same").spec_file).code == before
    told = shell("fork", "tiny-gpt", "--name", "other", "--code", "new").stdout
    code = read_run_file(child_of(made, "other").spec_file).code
    assert code is not None
    assert code != before
    assert f"{before} → {code}" in told
    assert f"{before} → {code}" in shell("explain", "other").stdout
    assert str(before) + " →" not in shell("explain", "same").stdout
