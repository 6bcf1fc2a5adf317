"""Which run a batch step is for, from the arguments that its script gives the supervisor."""

from __future__ import annotations

import json
import os
from pathlib import Path

from slurm_forge.errors import ForgeError
from slurm_forge.files import is_file, read_trusted
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.environment import SlurmEnvironment

_SCRIPT = "job.sbatch"


def run_of_arguments(arguments: list[str]) -> tuple[RunDirectory, str, Path | None]:
    """Run, how it was submitted, its script where there is one; ``ForgeError`` for no run."""
    options = {"--via": "sbatch", "--script": "", "--array": ""}
    places: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in options:
            options[argument] = next(rest, "")
        else:
            places.append(argument)
    if options["--array"]:
        places.append(_array_run(Path(options["--array"])))
    if len(places) != 1:
        raise ForgeError(
            f"expected one run directory, got {places}",
            next_step="python -m slurm_forge.process supervise|execute RUN [-- COMMAND …]",
        )
    run = RunDirectory.existing(places[0])
    script = Path(options["--script"]) if options["--script"] else run.submissions / _SCRIPT
    return run, options["--via"], script if is_file(script) else None


def _array_run(index: Path) -> str:
    """The run of this array task, from the list that was written at submission."""
    environment = SlurmEnvironment.from_environ(os.environ)
    task = None if environment is None else environment.array_task_id
    runs = json.loads(read_trusted(index, 1 << 24))
    if task is None or not isinstance(runs, list) or not 0 <= task < len(runs):
        raise ForgeError(
            f"array task {task} has no run in {index}",
            next_step="Submit the array again; the list was written for another one.",
        )
    return str(runs[task])
