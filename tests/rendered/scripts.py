"""Every site x template x size as the script that ``submit`` would hand to sbatch."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slurm_forge.launch.render.batch_script import render
from slurm_forge.launch.render.sbatch_options import asked_options, job_request
from slurm_forge.launch.submit.submission import run_file
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.loading import SitePlaces, packaged_folder
from slurm_forge.site.model import Site
from slurm_forge.site.rules import RuleFinding, findings
from slurm_forge.spec import JobSpec, job_from_mapping
from tests.unit.site.asked import ASKED, NODES

RUN = RunDirectory(Path("/runs/tiny"))


class Kind(str, enum.Enum):
    """The files of ``sbatch_templates/``: how a job file comes to be rendered with each."""

    SRUN = "srun"
    TORCHRUN = "torchrun"
    APPTAINER = "apptainer"
    PYXIS = "pyxis"
    EXEC = "exec"
    ARRAY = "array"


_ENTRY = {"entry": "tiny:train"}
_JOB: dict[Kind, dict[str, Any]] = {
    Kind.SRUN: _ENTRY,
    Kind.TORCHRUN: {**_ENTRY, "template": "torchrun"},
    Kind.APPTAINER: {
        **_ENTRY,
        "container": {
            "runtime": "apptainer",
            "image": "/images/torch.sif",
            "mounts": ["/data:/mnt:ro"],
        },
    },
    Kind.PYXIS: {
        **_ENTRY,
        "container": {"runtime": "pyxis", "image": "nvcr.io#nvidia/pytorch:26.10-py3"},
    },
    Kind.EXEC: {"command": ["srun", "python", "train.py", "--lr=0.1"]},
    Kind.ARRAY: {**_ENTRY, "template": "array", "chain": 10},
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """One script, its options in plain words, and what the site's rules say of the job."""

    site: str
    kind: Kind
    nodes: int
    options: tuple[str, ...]
    told: tuple[RuleFinding, ...]
    text: str

    @property
    def body(self) -> tuple[str, ...]:
        """The lines that bash does something with, or that explain them: all but the options."""
        return tuple(line for line in self.text.splitlines() if not line.startswith("#SBATCH"))


@cache
def site_named(name: str) -> Site:
    """A packaged site."""
    return SitePlaces(packaged=packaged_folder()).load(name).site


def job_at(name: str, kind: Kind, nodes: int) -> JobSpec:
    """The usual job at a site, on so many nodes, started by one of the templates."""
    resources = {"nodes": nodes, **ASKED[name]}
    return job_from_mapping({"name": "tiny", "resources": resources, **_JOB[kind]})


@cache
def rendered(name: str, kind: Kind, nodes: int) -> Rendered:
    """The script of that job."""
    site, job = site_named(name), job_at(name, kind, nodes)
    file = run_file(
        job, run=RUN, site=site, submitted_from=Path("/home/me"), python="/opt/py/bin/python"
    )
    options = asked_options(job, site, RUN)
    told = findings(job_request(job, site, options), site)
    return Rendered(name, kind, nodes, options, told, render(file, site, RUN))


def all_scripts() -> Iterator[Rendered]:
    """All of them, site by site."""
    for name in ASKED:
        for kind in Kind:
            for nodes in NODES:
                yield rendered(name, kind, nodes)
