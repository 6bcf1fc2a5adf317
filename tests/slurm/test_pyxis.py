"""A run in a container of pyxis: only where NVIDIA's pyxis and enroot are installed.

``FORGE_PYXIS`` names the plugin (spank_pyxis.so), ``FORGE_PYXIS_IMAGE`` a squashfs image
with a shell whose /etc/environment says ``CONTAINER_SAYS=inside``; this interpreter and torch are
mounted into it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from slurm_forge.testing.cluster import SlurmCluster
from slurm_forge.vocabulary.cause import Cause
from tests.jobs import consumed, told_variables
from tests.slurm.harness import submit

PLUGIN = os.environ.get("FORGE_PYXIS", "")
IMAGE = os.environ.get("FORGE_PYXIS_IMAGE", "")
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(not (PLUGIN and IMAGE), reason="pyxis is not installed (FORGE_PYXIS)"),
]
ARGS = {"steps": 120, "pace": 0.05, "variables": ["CONTAINER_SAYS"]}


@pytest.mark.parametrize("template", ["srun", "torchrun"])
def test_preempted_in_a_container_of_pyxis(
    slurm: SlurmCluster, tmp_path: Path, template: str
) -> None:
    stack = slurm.layout.slurm_conf.with_name("plugstack.conf")
    (tmp_path / "pyxis").mkdir()
    stack.write_text(f"required {PLUGIN} runtime_path={tmp_path}/pyxis execute_entrypoint=0\n")
    try:
        held = {"/usr", sys.prefix, sys.base_prefix, str(Path(torch.__file__).parents[1])}
        # All nodes are this machine, on which a container of a step can be made once.
        wanted = {
            "nodes": 1, "tasks_per_node": 2, "cpus_per_task": 1, "mem": "3500M",
            "time": "00:30:00", "partition": "preempt",
        }  # fmt: skip
        watched = submit(
            slurm, tmp_path, name="within", args=ARGS, template=template, resources=wanted,
            container={
                "runtime": "pyxis", "image": IMAGE, "python": sys.executable,
                "mounts": sorted(held),
            },
        )  # fmt: skip
        watched.wait_step(20)
        slurm.preempt(watched.job)
        watched.wait_finished()
    finally:
        stack.unlink()
    assert [i.cause for a in watched.state.attempts for _, i in a.incidents] == [Cause.PREEMPTED]
    assert len(consumed(watched.run.path)) == ARGS["steps"]
    inside = told_variables(watched.run.path, 1)
    assert len(inside) == 2
    assert all(each["CONTAINER_SAYS"] == "inside" for each in inside), inside
