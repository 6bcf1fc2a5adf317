"""The batch script of ``doctor --live``: the job's own place in the cluster, another program."""

from __future__ import annotations

import shlex
from datetime import timedelta
from pathlib import Path

from slurm_forge.launch.script import options
from slurm_forge.process import process_words
from slurm_forge.run_directory import RunDirectory
from slurm_forge.site.model import Site
from slurm_forge.site.rules import refused
from slurm_forge.spec import JobSpec, job_from_mapping

__all__ = ["LIMIT", "WARNED", "live_job", "live_script"]

#: The warning is due 40 s after the start.  Slurm looks every 30 s, and rather sends it early.
LIMIT = timedelta(minutes=4)
WARNED = timedelta(seconds=200)
_NAME = "forge-doctor"


def live_job(
    job: JobSpec | None, *, nodes: int, partition: str | None, qos: str | None, account: str | None
) -> JobSpec:
    """A job of a few minutes in the place of ``job``, or where the options say."""
    base = job_from_mapping({"name": _NAME, "command": ["true"]})
    resources = base.resources if job is None else job.resources
    changes: dict[str, object] = {
        "nodes": nodes,
        "spare_nodes": None,
        "tasks_per_node": 1,
        "time": LIMIT,
    }
    given = {"partition": partition, "qos": qos, "account": account}
    changes |= {name: value for name, value in given.items() if value is not None}
    setup = () if job is None else job.setup
    return base.model_copy(
        update={"resources": resources.model_copy(update=changes), "setup": setup}
    )


def live_script(
    job: JobSpec, site: Site, folder: Path, *, python: str, quick: bool, torch: bool, requeue: bool
) -> str:
    """The script; ``ConfigError`` for what the site refuses of such a job."""
    asked = list(options(job, site, RunDirectory.at(folder)))
    warned = int(WARNED.total_seconds())
    warning = f"--signal=USR2@{warned}"
    given = any(line.startswith("--signal=") for line in asked)
    warns = not quick and not given and refused((*asked, warning), site) is None
    if warns:
        asked.append(warning)
    facts = site.facts(job.resources.partition, job.resources.qos)
    modules = tuple(dict.fromkeys((*site.modules, *facts.modules)))
    command = [python, "-u", *process_words("live_job", str(folder))]
    command += [f"--warned={warned}"] if warns else ["--quick"]
    command += ["--torch"] if torch else []
    command += ["--requeue"] if requeue else []
    command += [f"--srun-option={option}" for option in site.srun_options]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in asked),
        *([f"module load {shlex.join(modules)}"] if modules else []),
        *site.setup,
        *job.setup,
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"
