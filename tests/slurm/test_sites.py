"""What a site's facts do on a real Slurm."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from slurm_forge.errors import ForgeError
from slurm_forge.journal import RunStatus
from slurm_forge.launch.render.batch_script import render
from slurm_forge.launch.render.site_choice import find_site
from slurm_forge.launch.submit.submission import create_run
from slurm_forge.site.model import Site
from slurm_forge.site.rules import features_of
from slurm_forge.slurm.text.directives import read_directives
from slurm_forge.spec import job_from_mapping
from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.testing.cluster.spec import PartitionPreemption, PartitionSpec
from tests.rendered.fuzz import cases, rendered_case
from tests.rendered.scripts import all_scripts
from tests.slurm.harness import REPOSITORY, environment, submit
from tests.unit.site.asked import ASKED

SLURM_FORGE = (sys.executable, "-m", "slurm_forge.cli.main")
pytestmark = [pytest.mark.slurm]


def _known_qos(slurm: SlurmCluster) -> set[str]:
    text = slurm.run("scontrol", "show", "assoc_mgr", "flags=qos").stdout
    return set(re.findall(r"^QOS=([^(\s]+)", text, re.MULTILINE))


def test_a_run_that_must_not_requeue_itself_waits_for_a_person(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Where it would come back it is held, and only ``slurm-forge requeue`` lets it go on."""
    rules = tmp_path / "hill.yaml"
    rules.write_text("name: hill\npartitions: {normal: {self_requeue_allowed: false}}\n")
    site = find_site(str(rules))
    watched = submit(
        slurm,
        tmp_path,
        name="debug",
        site=site,
        nodes=1,
        partition="normal",
        args={"steps": 30},
        inject=["exception@12:rank0"],
        recovery={"app_error": [{"do": "requeue", "times": 2}]},
    )
    held = watched.wait(lambda s: s.status is RunStatus.HELD, 90, "the run to be held")
    assert "hill does not let jobs requeue themselves here" in held.reason
    slurm.wait_for(
        lambda: (
            slurm.job(watched.job).state == "PENDING"
            and slurm.job(watched.job).field("Priority") == "0"
        ),
        30,
        "the job to wait, held",
    )
    with environment(slurm, tmp_path / "nodes"):
        asked = subprocess.run(
            [*SLURM_FORGE, "requeue", str(watched.run.path), "--site", str(rules)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=slurm.deadline(60),
        )
    assert asked.returncode == 0, asked.stderr + asked.stdout
    finished = watched.wait_finished()
    assert [a.number for a in finished.attempts] == [1, 2]


#: Sizes that the cluster of the tests can be; on 16 nodes the scripts differ in that number alone
#: (tests/golden/files).
SIZES = (1, 2)
#: What of a site can't be made up on the cluster of the tests, and why.
LEFT_OUT: dict[str, str] = {}


@pytest.fixture
def all_sites(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The partitions, features, kinds of GPU and QOS of all sites, on nodes of any size."""
    scripts = [script for script in all_scripts() if script.nodes in SIZES]
    asked = [dict(o.removeprefix("--").partition("=")[::2] for o in s.options) for s in scripts]
    partitions = dict.fromkeys(
        part for each in asked for part in each.get("partition", "normal").split(",")
    )
    features = dict.fromkeys(
        word for each in asked for word in sorted(features_of(each.get("constraint")))
    )
    counts = [each.get(key, "") for each in asked for key in ("gpus-per-node", "gpus", "gres")]
    kinds = dict.fromkeys(
        kind for each in counts for kind in re.findall(r"(?:^|gpu:)([a-z][a-z0-9]*):[0-9]", each)
    )
    names = sorted({each["qos"] for each in asked if "qos" in each})
    made_up = replace(
        slurm.spec,
        cpus=384,
        memory_mib=2_000_000,
        gpus=8,
        gpu_kinds=tuple(kinds.keys() - {"gpu"}),
        features=tuple(features),
        partitions=tuple(
            PartitionSpec(name=name, preempt_mode=PartitionPreemption.OFF, default=name == "normal")
            for name in dict.fromkeys(("normal", *partitions))
        ),
    )
    with slurm.configured(made_up):
        slurm.run("sacctmgr", "-i", "add", "qos", ",".join(names))
        slurm.wait_for(lambda: _known_qos(slurm) >= set(names), 30, "the QOS to be known")
        try:
            yield slurm
        finally:
            slurm.run("sacctmgr", "-i", "delete", "qos", ",".join(names))


def test_sbatch_takes_the_scripts_of_every_site_and_template(
    all_sites: SlurmCluster, tmp_path: Path
) -> None:
    refused: dict[str, str] = {}
    once: dict[tuple[str, ...], str] = {}
    for each in all_scripts():
        name = f"{each.site}-{each.kind.value}-{each.nodes}"
        if each.nodes in SIZES and each.site not in LEFT_OUT:
            once.setdefault(read_directives(each.text), name)
            (tmp_path / name).write_text(each.text)
    assert len(once) > len(SIZES) * len(ASKED), "sites that ask for the same"
    for name in once.values():
        done = all_sites.run("sbatch", "--test-only", str(tmp_path / name), check=False)
        if done.returncode != 0 or "to start at" not in done.stderr:
            refused[name] = done.stderr.strip()
    assert refused == {}


#: Lines that sbatch's own reader treats otherwise than a shell would.
ODD = (
    "--comment='a b' --mem=4G", '--comment="it\'s" # --array=1-9', r"--comment='it\'s #1'",
    r"--comment=a\\b\"", "--partition=a#b", "--comment=", "   --comment=x\t--mem=5G", "--requeue",
)  # fmt: skip


def test_directives_are_read_as_sbatch_reads_them(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Its own word on it, of odd lines and of scripts with hostile texts in their fields."""
    texts = [f"#!/bin/bash\n\n# note\n#SBATCH {line}\ntrue\n#SBATCH --array=1-9\n" for line in ODD]
    for case in cases(seed=3, count=700):
        with contextlib.suppress(ForgeError):
            text = rendered_case(case.draft()).text
            if "\0" not in text:  # of a path that no system has: sbatch does not read on at all
                texts.append(text)
    assert len(texts) > 100
    for text in texts[: len(ODD) + 60]:
        script = tmp_path / "job.sbatch"
        script.write_text(text)
        done = slurm.run("sbatch", "-vvvv", "--test-only", str(script), check=False)
        found = re.findall(r'Found in script, argument "(.*)"$', done.stderr, re.MULTILINE)
        assert found == list(read_directives(text)), text


#: One site for each way of asking for GPUs, on partitions that the test cluster has.
STYLES = [
    {"gpu_request": "gpus_per_node"},
    {"gpu_request": "gpus_per_task"},
    {"gpu_request": "gpus"},
    {"gpu_request": "gres"},
    {"sbatch_options": ["--hint=nomultithread"], "modules": ["cuda/12.4"]},
    {"gpu_request": "none"},
]


@pytest.mark.parametrize("facts", STYLES, ids=lambda facts: next(iter(facts.values())))
def test_sbatch_takes_what_is_asked_for(slurm: SlurmCluster, tmp_path: Path, facts: dict) -> None:
    site = Site.model_validate({"name": "hill", **facts})
    for nodes in (1, 2):
        job = job_from_mapping(
            {
                "name": f"n{nodes}",
                "entry": "tests/jobs.py:train",
                "resources": {
                    "nodes": nodes,
                    "tasks_per_node": 2,
                    "gpus_per_node": 2,
                    "time": timedelta(minutes=1),
                    "partition": "normal",
                },
            }
        )
        run, file = create_run(job, runs=tmp_path / "runs", site=site, submitted_from=REPOSITORY)
        script = tmp_path / f"{nodes}.sbatch"
        script.write_text(render(file, site, run))
        asked = slurm.run("sbatch", "--test-only", str(script))
        assert "to start at" in asked.stderr + asked.stdout
