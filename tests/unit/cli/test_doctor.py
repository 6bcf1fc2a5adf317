"""``doctor`` and ``sites detect``: what a person reads, what a program reads, exit status."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from slurm_forge.errors import SlurmCommandError, SlurmUnreachableError
from slurm_forge.journal.events import CheckpointCommitted
from slurm_forge.slurm.client import SubprocessSlurm
from tests.unit.cli.conftest import Shell
from tests.unit.report.journals import Scribe
from tests.unit.slurm.recorded import Recorded, recorded

NOT_HERE = SlurmUnreachableError(("scontrol",), 127, "scontrol can't be started: not here")


@pytest.fixture(params=["v22", "v26"])
def slurm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return pretend(Recorded(recorded(request.param)), monkeypatch)


def pretend(slurm: Recorded, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(SubprocessSlurm, "of_this_process", classmethod(lambda cls: slurm))
    monkeypatch.setattr("slurm_forge.cli.cluster.cluster_survey.person", lambda: "root")
    return slurm


def plain(text: str) -> str:
    return " ".join(text.split())


def test_the_truth_about_the_test_cluster(shell: Shell, slurm: Recorded) -> None:
    told = shell("doctor", "--site", "test_cluster")
    text = plain(told.stdout)
    assert told.exit_code == 0, told.stdout
    assert "7 of 7 questions were answered" in text
    assert "nothing in it contradicts Slurm" in text
    assert "partition normal, QOS scavenge: jobs are not preempted." in text
    assert "Slurm requeues the job 10 s later" in text
    assert "Slurm cancels the job 20 s later" in text
    assert "The longest time limit is 24 h" in text, "the QOS' MaxWall"
    assert "partition preempt-nograce" in text and "Slurm gives no notice" in text


def test_for_programs(shell: Shell, slurm: Recorded) -> None:
    body = json.loads(shell("doctor", "--json", "--site", "test_cluster").stdout)
    assert body["schema"] == 1 and body["differences"] == []
    places = {each["partition"]: each for each in body["places"]}
    assert places["preempt"]["mode"] == "REQUEUE" and places["preempt"]["notice_s"] == 10
    assert places["preempt"]["back_by"] == "the run" and places["preempt"]["same_job"] is True
    assert places["preempt-nograce"]["back_by"] == "Slurm"
    assert places["cancel"]["preempted_by"] == ["normal"]
    assert places["normal"]["mode"] == "OFF" and places["normal"]["limit_s"] == 86400
    assert all(each["reply"] == "answered" for each in body["questions"])


def test_a_site_file_that_is_wrong_is_a_problem_with_its_line(
    shell: Shell, slurm: Recorded
) -> None:
    wrong = shell.folder / "hill.yaml"
    wrong.write_text(
        'name: hill\npartitions:\n  cancel: {preemption: {mode: CANCEL, grace: "5m"}}\n'
    )
    told = shell("doctor", "--site", str(wrong))
    assert told.exit_code == 1
    assert (
        "hill.yaml:3: partitions.cancel.preemption.grace says 300s, Slurm says 20s (scontrol show "
        "partition)" in plain(told.stdout)
    )
    assert "-> Correct the file" in plain(told.stdout)


def test_a_job_file_that_asks_for_too_much(shell: Shell, slurm: Recorded) -> None:
    text = (shell.folder / "train.yaml").read_text()
    text = text.replace("partition: long", "partition: cancel").replace('"00:30:00"', '"48:00:00"')
    (shell.folder / "train.yaml").write_text(text)
    told = shell("doctor", "train.yaml", "--site", "test_cluster")
    assert told.exit_code == 1
    shown = plain(told.stdout)
    assert "partition cancel, QOS scavenge: the job asks for 2 d" in shown
    assert "Shorten resources.time" in shown
    assert "partition normal" not in shown.partition("what happens")[2].partition("storage")[
        0
    ].replace("(by partition normal)", "")


def test_a_job_that_is_an_array_of_attempts_goes_on_in_the_next_task(
    shell: Shell, slurm: Recorded
) -> None:
    text = (shell.folder / "train.yaml").read_text()
    text = text.replace("partition: long", "partition: cancel")
    (shell.folder / "train.yaml").write_text(f"{text}\ntemplate: array\nchain: 3\n")
    told = plain(shell("doctor", "train.yaml", "--site", "test_cluster").stdout)
    assert "next task" in told.partition("what happens")[2]


def test_a_job_in_a_partition_that_does_not_exist(shell: Shell, slurm: Recorded) -> None:
    told = shell("doctor", "train.yaml", "--site", "test_cluster")
    assert told.exit_code == 1
    assert "partition long" in told.stdout
    assert "Slurm has no partition of that name" in plain(told.stdout)


def test_without_slurm_the_rest_is_looked_at(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(Recorded({}, {"s": NOT_HERE}), monkeypatch)
    told = shell("doctor")
    assert told.exit_code == 2
    shown = plain(told.stdout)
    assert "Python 3." in shown and "slurm_forge" in shown
    assert "locks hold between processes" in shown and "inodes" in shown
    assert "every 10 min: nothing was measured" in shown
    assert "no site file describes this cluster" in shown


def test_commands_of_no_cluster_are_not_asked_to_be_asked_again(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "Could not establish a configuration source"
    pretend(Recorded({}, {"s": SlurmUnreachableError(("scontrol",), 1, words)}), monkeypatch)
    shown = plain(shell("doctor").stdout)
    assert words in shown
    assert "go to a login node" in shown
    assert "scontrol ping" not in shown


def test_what_is_refused_is_told_and_nothing_guessed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = recorded("v26") | {"sacctmgr --json": "{}"}
    forbidden = SlurmCommandError(("sacctmgr",), 1, "Access/permission denied")
    pretend(Recorded(answers, {"sacctmgr": forbidden}), monkeypatch)
    told = shell("doctor", "--site", "test_cluster")
    assert told.exit_code == 0
    assert "`sacctmgr show qos`: refused: Access/permission denied" in plain(told.stdout)
    assert "QOS" not in plain(told.stdout).partition("what happens to a run")[2]


def test_the_interval_rests_on_earlier_runs(shell: Shell, slurm: Recorded, scribe: Scribe) -> None:
    scribe.begin("n1")
    for step in (100, 200):
        scribe.write(
            "rank0",
            CheckpointCommitted(
                name=f"step-{step:08d}.a1.l1-{step:08x}", step=step, reason="periodic",
                seconds=12.0, size=1 << 30, blocked_s=3.0,
            ),
        )  # fmt: skip
    text = plain(shell("doctor", "--site", "test_cluster").stdout)
    assert "2 saves in 1 run here took 12 s at most and blocked training for 3.0 s" in text
    assert "a save takes 12 s and the notice is 10 s" in text, "known before it happens"


def test_a_journal_with_impossible_times_is_left_out(
    shell: Shell, slurm: Recorded, scribe: Scribe
) -> None:
    scribe.begin("n1")
    scribe.write(
        "rank0",
        CheckpointCommitted(
            name="step-00000100.a1.l1-00000100", step=100, reason="periodic", seconds=1e300,
            size=1 << 30, blocked_s=1e300,
        ),
    )  # fmt: skip
    told = shell("doctor", "--site", "test_cluster")
    assert told.exit_code == 0 and "nothing was measured" in plain(told.stdout)


def test_a_site_file_is_written_once(shell: Shell, slurm: Recorded) -> None:
    printed = shell("sites", "detect")
    assert printed.exit_code == 0 and "preempt-nograce" in printed.stdout
    name = printed.stdout.partition("\nname: ")[2].partition("\n")[0]
    path = shell.folder / ".config" / "slurm_forge" / "sites" / f"{name}.yaml"
    assert not path.exists()
    written = shell("sites", "detect", "--write")
    assert written.exit_code == 0 and path.read_text() == printed.stdout
    assert path.stat().st_mode & 0o022 == 0, "others could change it"
    path.write_text("name: mine\n")
    refused = shell("sites", "detect", "--write")
    assert refused.exit_code == 2 and "already exists" in refused.stderr
    assert path.read_text() == "name: mine\n"
    assert shell("sites", "detect", "--write", "--force").exit_code == 0
    assert path.read_text() == printed.stdout
    assert shell("sites", "check", str(path)).exit_code == 0
    doctor = shell("doctor")
    assert doctor.exit_code == 0 and "nothing in it contradicts Slurm" in plain(doctor.stdout)
    assert f"sites/{name}.yaml" in doctor.stdout, "the user's own comes first"


def test_a_site_file_somewhere_else(shell: Shell, slurm: Recorded) -> None:
    assert shell("sites", "detect", "--to", "hill.yaml").exit_code == 0
    assert "\nname: hill\n" in Path("hill.yaml").read_text()
    refused = shell("sites", "detect", "--to", "a hill.yml")
    assert refused.exit_code == 2 and "can't be the name of a site file" in refused.stderr


def test_no_site_file_without_slurm(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(Recorded({}, {"s": NOT_HERE}), monkeypatch)
    told = shell("sites", "detect", "--write")
    assert told.exit_code == 2 and "login node" in told.stderr
    assert not (shell.folder / ".config").exists()


def test_a_partition_that_is_no_name_is_no_crash(shell: Shell, slurm: Recorded) -> None:
    told = shell("doctor", "train.yaml", "--partition", ",", "--site", "test_cluster")
    assert told.exception is None or isinstance(told.exception, SystemExit)
    assert "no partition is known" in plain(told.stdout)


def test_what_slurm_says_never_reaches_the_terminal_as_it_is(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = recorded("v26")
    answers["scontrol -a show partition"] = answers["scontrol -a show partition"].replace(
        "PartitionName=preempt", "PartitionName=pre\x1b]0;owned\x07empt"
    )
    loud = SlurmCommandError(("sacctmgr",), 1, "\x1b[31mdenied\x1b[0m\u202e")
    pretend(Recorded(answers, {"sacctmgr": loud}), monkeypatch)
    for words in (("doctor", "--site", "generic"), ("sites", "detect")):
        told = shell(*words)
        assert "empt" in told.stdout and "denied" in told.stdout + told.stderr
        written = (told.stdout + told.stderr).replace("\n", "")
        assert written.isprintable(), [each for each in written if not each.isprintable()]


def test_a_folder_of_site_files_is_nobody_elses_to_write(shell: Shell, slurm: Recorded) -> None:
    before = os.umask(0)
    try:
        assert shell("sites", "detect", "--write").exit_code == 0
    finally:
        os.umask(before)
    made = shell.folder / ".config"
    for each in (made, made / "slurm_forge", made / "slurm_forge" / "sites"):
        assert each.stat().st_mode & 0o022 == 0, each


def test_codes_that_hold_a_job_are_not_told_as_codes_that_requeue_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = recorded("v26")
    config = re.sub(
        r"(?m)^RequeueExit .*$", "RequeueExit = (null)", answers["scontrol show config"]
    )
    config = re.sub(r"(?m)^RequeueExitHold .*$", "RequeueExitHold = 9", config)
    pretend(Recorded(answers | {"scontrol show config": config}), monkeypatch)
    text = plain(shell("doctor", "--site", "test_cluster").stdout)
    assert "RequeueExitHold=9: Slurm requeues jobs that end with these codes and holds them" in text
    assert "RequeueExit=" not in text


def test_a_controller_that_does_not_answer_is_told_once(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = SlurmUnreachableError(("scontrol",), 124, "no answer within 10 s.")
    pretend(Recorded({}, {"s": late}), monkeypatch)
    text = plain(shell("doctor").stdout)
    assert "`scontrol show config`: no answer within 10 s. ->" in text


@pytest.mark.parametrize(
    ("off", "words"),
    [(0, ""), (-3600, "ahead of the controller's"), (3600, "behind the controller's")],
)
def test_a_clock_that_differs_from_the_controllers_is_told(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, off: int, words: str
) -> None:
    answers = recorded("v22")
    now = f"as of {round(time.time()) + off}\n"
    config = answers["scontrol show config"].replace("as of 1795255017\n", now)
    pretend(Recorded(answers | {"scontrol show config": config}), monkeypatch)
    text = plain(shell("doctor").stdout)
    assert ("the controller's" in text) is bool(words)
    assert words in text
