"""``sites``: what is known of a cluster, with the line that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import JOB, PretendSlurm, Shell

HILL = """\
name: hill
title: The hill
cluster_names: [hill]
partitions:
  long: {preemption: {mode: CANCEL, grace: "120s"}, expected_bandwidth: "180 GB/s"}
env:
  always:
    NCCL_DEBUG: WARN
  on_hang: {NCCL_DEBUG: INFO}
  never: {NCCL_P2P_DISABLE: it halves the bandwidth}
"""


@pytest.fixture
def own(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of sites, with one in it."""
    monkeypatch.setenv("HOME", str(shell.folder))
    for name in ("NCCL_DEBUG", "NCCL_P2P_DISABLE", "SLURM_FORGE_SITE"):
        monkeypatch.delenv(name, raising=False)
    folder = shell.folder / ".config" / "slurm_forge" / "sites"
    folder.mkdir(parents=True)
    (folder / "hill.yaml").write_text(HILL)
    return folder


def test_every_file_is_listed(shell: Shell, own: Path) -> None:
    (own / "broken.yaml").write_text("name: broken\nprempt: {}\n")
    (own / "generic.yaml").write_text("name: generic\ntitle: mine\n")
    lines = shell("sites", "list").stdout.splitlines()
    told = [line.split()[:2] for line in lines]
    assert told[:3] == [["broken", "yours"], ["generic", "yours"], ["hill", "yours"]]
    assert {kind for _, kind in told[3:]} == {"packaged"}
    assert ["test_cluster", "packaged"] in told
    assert "prempt" in lines[0], "one bad file hides the others"
    packaged = lines[told.index(["generic", "packaged"])]
    assert packaged.endswith("(replaced by yours)")
    body = json.loads(shell("sites", "list", "--json").stdout)
    assert [each["name"] for each in body["sites"] if each["replaced"]] == ["generic"]


def test_each_value_with_its_line(shell: Shell, own: Path) -> None:
    told = shell("sites", "show", "hill", "--origin").stdout
    file = ".config/slurm_forge/sites/hill.yaml"
    rows = {line.split()[0]: line.split() for line in told.splitlines()[1:]}
    assert rows["env.always.NCCL_DEBUG"] == ["env.always.NCCL_DEBUG", "WARN", f"{file}:8"]
    assert rows["env.on_hang.NCCL_DEBUG"][1:] == ["INFO", f"{file}:9"]
    assert rows["partitions.long.expected_bandwidth"][1:] == ["180", "GB/s", f"{file}:5"]
    assert rows["env.never.NCCL_P2P_DISABLE"][-1] == f"{file}:10"
    assert rows["shorten_requeue"][1:] == ["true", "default"]
    unknown = told.splitlines()[-1]
    assert "socket_interface" in unknown
    assert "env" not in unknown.replace(",", "").split()


def test_what_the_environment_has_instead_is_told(
    shell: Shell, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "VERSION")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    told = shell("sites", "show", "hill").stdout
    assert "(your environment has VERSION, which wins)" in told
    assert "(your environment has 1)" in told
    body = json.loads(shell("sites", "show", "hill", "--json").stdout)
    (value,) = [each for each in body["values"] if each["key"] == "env.always.NCCL_DEBUG"]
    assert (value["value"], value["line"]) == ("WARN", 8)


def test_this_cluster_without_a_name(shell: Shell, own: Path, slurm: PretendSlurm) -> None:
    assert "Slurm's ClusterName is hill" in shell("sites", "show").stdout
    wrong = shell("sites", "show", "hil")
    assert wrong.exit_code == 2
    assert 'did you mean "hill"' in wrong.stderr


def test_a_forbidden_variable_is_told_before_anything_is_submitted(
    shell: Shell, own: Path, slurm: PretendSlurm
) -> None:
    (shell.folder / "train.yaml").write_text(JOB + 'env: {NCCL_P2P_DISABLE: "1"}\n')
    result = shell("submit", "train.yaml")
    assert result.exit_code == 0, result.output
    told = "hill: the job file sets NCCL_P2P_DISABLE=1, which must not be set here: it halves"
    assert told in result.stdout
    assert len(slurm.submitted) == 1


def test_a_policy_is_tried_with_the_sites_variables(shell: Shell, own: Path) -> None:
    (shell.folder / "train.yaml").write_text(JOB)
    words = ("policy", "test", "train.yaml", "--cause", "hang")
    told = shell(*words, "--site", "hill").stdout
    assert "     variables  - → NCCL_DEBUG=INFO\n" in told
    assert "variables" not in shell(*words).stdout


def test_a_sound_file_is_told_from_one_with_mistakes(shell: Shell, own: Path) -> None:
    hill = str(own / "hill.yaml")
    wrong = shell("sites", "check", hill)
    assert wrong.exit_code == 1
    lines = wrong.stdout.splitlines()
    assert f"{hill}:1: contact: no contact; give the centre's help page or mail address" in lines
    assert lines[-1] == "4 mistakes; how a site file is written: docs/sites/contributing.md"
    (own / "hill.yaml").write_text(
        HILL + 'contact: me\nconfidence: tried\nchecked: "2026-11"\n'
        'sources: [{page: scontrol show config, seen: "2026-11"}]\n'
    )
    sound = shell("sites", "check", hill)
    assert (sound.exit_code, sound.stdout) == (0, f"{hill}: no mistakes\n")


def test_a_file_that_can_not_be_read_is_a_mistake_of_its_own(shell: Shell, own: Path) -> None:
    (own / "broken.yaml").write_text("name: broken\nprempt: {}\n")
    result = shell("sites", "check", str(own / "broken.yaml"), str(own / "hill.yaml"), "gone.yaml")
    assert result.exit_code == 1
    told = result.stdout
    assert f'{own}/broken.yaml:2: prempt: unknown key (did you mean "preemption_default"?)' in told
    assert "gone.yaml: can't be read: No such file or directory" in told
    assert f"{own}/hill.yaml:1: contact" in told, "the others are checked as well"
    body = json.loads(shell("sites", "check", str(own / "broken.yaml"), "--json").stdout)
    assert [(each["line"], each["kind"]) for each in body["remarks"]] == [(2, "mistake")]


def test_the_schema_is_that_of_the_repository(shell: Shell) -> None:
    from slurm_forge.site.loading import packaged_folder

    told = shell("sites", "schema").stdout
    assert told == (packaged_folder() / "site.schema.json").read_text()


def test_one_of_several_clusters_has_its_own_lines(
    shell: Shell, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "hills.yaml").write_text(
        "name: hills\ndetect: {variables: {HILL: [near, far]}}\nclusters:\n"
        "  near: {internet_on_compute_nodes: true}\n"
        "  far:\n    internet_on_compute_nodes: false\n    everywhere: {gpu: A100}\n"
    )
    monkeypatch.setenv("HILL", "far")
    told = shell("sites", "show", "hills", "--origin").stdout
    rows = {line.split()[0]: line.split() for line in told.splitlines()[1:]}
    file = ".config/slurm_forge/sites/hills.yaml"
    assert rows["internet_on_compute_nodes"][1:] == ["false", f"{file}:6"]
    assert rows["everywhere.gpu"][1:] == ["A100", f"{file}:7"]
    assert "(HILL is far)" in shell("sites", "show").stdout
