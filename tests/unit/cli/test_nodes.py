"""``nodes``, and what a submission makes of it."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from slurm_forge.errors import SlurmUnreachableError
from slurm_forge.node_ledger import NodeLedger
from slurm_forge.recovery.nodes.statements import Strike
from slurm_forge.slurm.records import PartitionRecord
from tests.unit.cli.conftest import JOB, PretendSlurm, Shell
from tests.unit.cli.test_start import HEAVY, imported

DAY = 86_400.0


@pytest.fixture
def hill(slurm: PretendSlurm) -> PretendSlurm:
    """A cluster of 30 nodes in two partitions."""
    slurm.partitions = (
        PartitionRecord(name="long", nodes="n[01-20]", is_default=True),
        PartitionRecord(name="short", nodes="n[21-30]"),
    )
    return slurm


def ledger(shell: Shell, folder: str = ".local/state/slurm_forge/nodes") -> NodeLedger:
    return NodeLedger(folder=shell.folder / folder, cluster="hill")


def hang(node: str, age: float, incident: str = "1.1", by: str = "ann") -> Strike:
    return Strike(
        node=node, time=time.time() - age, weight=0.75, cause="hang",
        run="/scratch/runs/tiny-gpt", incident_id=incident, by=by,
    )  # fmt: skip


def excluded(slurm: PretendSlurm) -> tuple[str, ...]:
    return slurm.submitted[-1][1]


# list


def test_an_empty_ledger(shell: Shell, hill: PretendSlurm) -> None:
    result = shell("nodes", "list")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"hill   0 nodes excluded   {ledger(shell).folder}\n"


def test_list_says_which_nodes_are_left_out_why_and_until_when(
    shell: Shell, hill: PretendSlurm
) -> None:
    ledger(shell).add([hang("n06", 2 * DAY), hang("n06", DAY, "2.1"), hang("n07", 7 * DAY)])
    ledger(shell).add([hang("n08", 12 * DAY)])
    result = shell("nodes", "list")
    head, worst, other, *rest = result.stdout.splitlines()
    assert head.startswith("hill   1 node excluded   ")
    assert worst.startswith("  n06   until ")
    assert "   score 1.07   2 hang, last 24 h ago   tiny-gpt" in worst
    assert other.split("   ")[:2] == ["  n07", "in use"] or "n07   in use" in other
    assert "  and 1 node with a low score: --all" in rest
    assert "n08" not in result.stdout
    everything = shell("nodes", "list", "--all").stdout
    assert "n08" in everything
    assert "hang   0.75   tiny-gpt 2.1   by ann" in everything


def test_list_for_programs(shell: Shell, hill: PretendSlurm) -> None:
    ledger(shell).add([hang("n06", 2 * DAY), hang("n06", DAY, "2.1"), hang("n07", 7 * DAY)])
    body = json.loads(shell("nodes", "list", "--json").stdout)
    assert " ".join(body) == "schema cluster folder threshold cap known nodes skipped problems"
    worst, other = body["nodes"]
    assert (worst["node"], worst["left_out"], worst["by_hand"]) == ("n06", True, False)
    assert (worst["convicted"], other["convicted"]) == (True, False)
    assert worst["causes"] == ["hang"]
    assert worst["runs"] == ["/scratch/runs/tiny-gpt"]
    assert [each["incident"] for each in worst["strikes"]] == ["2.1", "1.1"]
    assert time.time() < worst["until"] < time.time() + DAY
    assert (other["node"], other["left_out"], other["until"]) == ("n07", False, None)


def lost(node: str) -> Strike:
    return Strike(
        node=node, time=time.time() - 60, weight=1.9, cause="node_fail", run="/r", incident_id="1.1"
    )


def test_list_says_which_of_the_convicted_are_used_all_the_same(
    shell: Shell, hill: PretendSlurm
) -> None:
    ledger(shell).add([lost(f"n0{number}") for number in range(1, 6)])
    listed = shell("nodes", "list").stdout
    assert listed.startswith("hill   2 nodes excluded, 3 used anyway   ")
    assert listed.count("   in use: too many   ") == 3
    assert "at least one node (2 of 20 in long, 1 of 10 in short), the worst first" in listed
    body = json.loads(shell("nodes", "list", "--json").stdout)
    assert [each["left_out"] for each in body["nodes"]] == [True, True, False, False, False]
    assert all(each["convicted"] for each in body["nodes"])
    # Which partitions there are is not known.
    body = json.loads(shell("nodes", "list", "--json", "--cluster", "hill").stdout)
    assert [each["left_out"] for each in body["nodes"]] == [None] * 5


def test_strangers_do_not_count_and_what_a_group_has_planted_is_listed(
    shell: Shell, hill: PretendSlurm
) -> None:
    folder = ledger(shell).folder
    assert folder is not None
    ledger(shell).add([lost("n06")])
    (folder / "4242").symlink_to("/etc")
    assert "not read: " not in shell("nodes", "list").stdout
    site = shell.folder / "hill.yaml"
    site.write_text(f"name: hill\nnode_ledger: {folder}\n")
    site.chmod(0o600)
    listed = shell("nodes", "list", "--site", "./hill.yaml").stdout
    assert "n06" in listed
    assert "not read: " in listed


def test_what_is_not_read_is_said(shell: Shell, hill: PretendSlurm) -> None:
    ledger(shell).add([hang("n06", 60)])
    file = next((shell.folder / ".local").rglob("*.jsonl"))
    file.write_bytes(file.read_bytes() + b"nonsense\n")
    assert "1 damaged line not read" in shell("nodes", "list").stdout
    file.chmod(0o666)
    result = shell("nodes", "list")
    assert result.exit_code == 0
    assert "not read: " in result.stdout
    assert "can be written by other users" in result.stdout


def test_without_slurm_the_cluster_is_named(shell: Shell, slurm: PretendSlurm) -> None:
    slurm.error = SlurmUnreachableError(("scontrol",), 127, "scontrol can't be started")
    result = shell("nodes", "list")
    assert result.exit_code == 2
    assert "--cluster NAME" in result.stderr
    ledger(shell).add([hang("n06", 60)])
    assert "n06" in shell("nodes", "list", "--cluster", "hill").stdout


# strike and release


def test_strike_and_release(shell: Shell, hill: PretendSlurm) -> None:
    result = shell("nodes", "strike", "n06", "n[08-09]", "--why", "ticket 4711")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "n[06,08-09]: excluded from your jobs until released, as long as enough other nodes "
        "remain.   "
        "trust again: slurm-forge nodes release n[06,08-09]\n"
    )
    listed = shell("nodes", "list").stdout
    assert listed.count("until released") == 3
    assert '"ticket 4711"' in listed
    result = shell("nodes", "release", "n[08-10]", "--json")
    assert json.loads(result.stdout)["nodes"] == ["n08", "n09", "n10"]
    listed = shell("nodes", "list").stdout
    assert "n06" in listed
    assert "n08" not in listed
    assert shell("nodes", "release", "n10").stdout == (
        "n10: trusted again.\nno strikes against n10\n"
    )


def test_strike_for_some_time(shell: Shell, hill: PretendSlurm) -> None:
    body = json.loads(
        shell("nodes", "strike", "n06", "--why", "hot", "--for", "2d", "--json").stdout
    )
    assert 1.99 * DAY < body["until"] - time.time() <= 2 * DAY
    assert shell("nodes", "list").stdout.count("until released") == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["n6", "--why", "x"], "there is no node 'n6' in any partition (did you mean"),
        (["n06", "--why", "x", "--for", "2"], "--for: "),
        (["n06", "--why", "x", "--for", "0s"], "--for must be longer than 0"),
        (["n[1-", "--why", "x"], "node list"),
        (["n06"], "--why"),
    ],
)
def test_a_slip_strikes_nothing(
    shell: Shell, hill: PretendSlurm, words: list[str], told: str
) -> None:
    result = shell("nodes", "strike", *words)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "0 nodes excluded" in shell("nodes", "list").stdout


def test_words_of_others_can_not_move_the_terminal(shell: Shell, hill: PretendSlurm) -> None:
    assert shell("nodes", "strike", "n06", "--why", "a\x1b[2Jb\nc").exit_code == 0
    listed = shell("nodes", "list", "--all").stdout
    assert "\x1b" not in listed
    assert '"a?[2Jb c"' in listed


def test_it_starts_fast(shell: Shell) -> None:
    assert not imported("nodes", "list", "--cluster", "hill") & HEAVY


@pytest.mark.parametrize("verb", ["list", "release", "strike"])
def test_the_help_has_an_example(shell: Shell, verb: str) -> None:
    said = " ".join(shell("nodes", verb, "--help").stdout.split())
    assert f"Examples: slurm-forge nodes {verb} " in said


# Where the ledger lies


def test_the_environment_and_the_site_say_where(
    shell: Shell, hill: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shell.folder / "group").mkdir()
    site = shell.folder / "hill.yaml"
    site.write_text(f"name: hill\nnode_ledger: {shell.folder}/group\n")
    site.chmod(0o600)
    assert shell("nodes", "strike", "n06", "--why", "x", "--site", "./hill.yaml").exit_code == 0
    assert (shell.folder / "group" / str(os.geteuid()) / "hill").is_dir()
    assert "n06" in shell("nodes", "list", "--site", "./hill.yaml").stdout
    assert "n06" not in shell("nodes", "list").stdout
    monkeypatch.setenv("SLURM_FORGE_NODES", str(shell.folder / "mine"))
    assert "n06" not in shell("nodes", "list", "--site", "./hill.yaml").stdout
    monkeypatch.setenv("SLURM_FORGE_NODES", "off")
    assert shell("nodes", "list").stdout == "no node ledger is kept: SLURM_FORGE_NODES=off\n"
    assert "nothing was written" in shell("nodes", "strike", "n06", "--why", "x").stdout


# submit


def submit(shell: Shell, resources: str = "") -> str:
    (shell.folder / "train.yaml").write_text(
        JOB.replace("{partition: long,", "{partition: long, " + resources)
    )
    result = shell("submit", "train.yaml")
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_submit_leaves_out_what_is_struck_and_says_so(shell: Shell, hill: PretendSlurm) -> None:
    ledger(shell).add([hang("n06", 2 * DAY), hang("n06", DAY, "2.1"), hang("n07", 7 * DAY)])
    told = submit(shell)
    assert "excluding n06 (hang 24 h ago, until " in told
    assert "): slurm-forge nodes list\n" in told
    assert excluded(hill) == ("--exclude=n06",)
    # It is of this moment: neither the run nor its script holds it.
    assert "n06" not in (shell.folder / "runs/tiny-gpt/run.yaml").read_text()
    assert "n06" not in hill.submitted[-1][0].read_text()


def test_submit_for_programs_notes_it(shell: Shell, hill: PretendSlurm) -> None:
    shell("nodes", "strike", "n06", "--why", "x")
    notes = json.loads(shell("submit", "train.yaml", "--json").stdout)["notes"]
    told = [note for note in notes if note.startswith("excluding n06 (struck by a user ")]
    assert len(told) == 1
    assert told[0].endswith(", until released): slurm-forge nodes list")


def test_nothing_is_said_where_nothing_is_left_out(shell: Shell, hill: PretendSlurm) -> None:
    ledger(shell).add([hang("n06", DAY)])
    assert "excluding" not in submit(shell)
    assert excluded(hill) == ()


def test_the_users_own_list_is_kept(shell: Shell, hill: PretendSlurm) -> None:
    shell("nodes", "strike", "n06", "n02", "--why", "x")
    submit(shell, 'exclude: "n[01-02]", ')
    assert excluded(hill) == ("--exclude=n[01-02,06]",)


def test_a_list_in_a_file_is_the_users_alone(shell: Shell, hill: PretendSlurm) -> None:
    shell("nodes", "strike", "n06", "--why", "x")
    assert "excluding" not in submit(shell, "exclude: ./bad-nodes.txt, ")
    assert excluded(hill) == ()


def test_a_node_asked_for_by_name_is_never_left_out(shell: Shell, hill: PretendSlurm) -> None:
    shell("nodes", "strike", "n06", "n07", "--why", "x")
    assert "excluding n07 " in submit(shell, 'nodelist: "n[05-06]", ')
    assert excluded(hill) == ("--exclude=n07",)


def test_never_more_than_a_share_nor_more_than_the_job_can_do_without(
    shell: Shell, hill: PretendSlurm
) -> None:
    ledger(shell).add([lost(f"n0{number}") for number in (5, 4, 3, 2, 1)])  # the newest weighs most
    told = submit(shell)
    assert "excluding n01 (" in told
    assert excluded(hill) == ("--exclude=n[01-02]",)


def test_what_a_person_struck_is_left_out_whatever_the_share(
    shell: Shell, hill: PretendSlurm
) -> None:
    shell("nodes", "strike", "n[01-05]", "--why", "x")
    submit(shell)
    assert excluded(hill) == ("--exclude=n[01-05]",)
    assert shell("nodes", "list").stdout.startswith("hill   5 nodes excluded   ")
    shutil.rmtree(shell.folder / "runs")
    submit(shell, "nodes: 18, ")
    assert excluded(hill) == ("--exclude=n[01-02]",)


def test_a_job_that_needs_all_nodes_gets_them(shell: Shell, hill: PretendSlurm) -> None:
    shell("nodes", "strike", "n[01-05]", "--why", "x")
    assert "excluding" not in submit(shell, "nodes: 20, ")
    assert excluded(hill) == ()


def test_nodes_of_other_partitions_are_not_named(shell: Shell, hill: PretendSlurm) -> None:
    # Slurm refuses a job that names a node which is gone.
    shell("nodes", "strike", "n21", "--why", "x")
    shell("nodes", "strike", "old-node", "--why", "x", "--cluster", "hill")
    assert "excluding" not in submit(shell)


def test_where_slurm_does_not_say_which_nodes_there_are_none_is_named(
    shell: Shell, hill: PretendSlurm
) -> None:
    shell("nodes", "strike", "n06", "--why", "x")
    hill.partitions = (PartitionRecord(name="long", is_default=True),)
    assert "excluding" not in submit(shell)
    assert excluded(hill) == ()


def test_a_ledger_that_can_not_be_read_stops_no_job(
    shell: Shell, hill: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = shell.folder / "file"
    blocked.write_text("")
    monkeypatch.setenv("SLURM_FORGE_NODES", str(blocked))
    told = submit(shell)
    assert told.count("the node ledger: ") == 1
    assert "submitted tiny-gpt as job 8812301." in told


def test_a_folder_that_is_no_path_stops_no_job(
    shell: Shell, hill: PretendSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_FORGE_NODES", "relative/path")
    told = submit(shell)
    assert "the node ledger: SLURM_FORGE_NODES: 'relative/path' is not the path" in told
    result = shell("nodes", "list")
    assert result.exit_code == 2


def test_long_lists_are_cut(shell: Shell, hill: PretendSlurm) -> None:
    hill.partitions = (PartitionRecord(name="long", nodes="n[001-200]", is_default=True),)
    shell("nodes", "strike", "n[001-009]", "--why", "x")
    assert " and 4 more: slurm-forge nodes list" in submit(shell)
    assert excluded(hill) == ("--exclude=n[001-009]",)


def test_submitting_makes_no_ledger(shell: Shell, hill: PretendSlurm) -> None:
    submit(shell)
    assert not (shell.folder / ".local").exists()
