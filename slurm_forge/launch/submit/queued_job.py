"""The job that a script was submitted as, where the answer of sbatch was lost."""

from __future__ import annotations

from pathlib import Path

from slurm_forge.errors import RunDirectoryError
from slurm_forge.journal.events import Submitted
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.launch.submit.submission import job_script, note, untouched
from slurm_forge.person import person
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import TERMINAL

#: One question to Slurm each.
_LOOKED_AT = 100


def job_of_script(script: Path, slurm: Slurm) -> JobRecord | None:
    """The person's newest job in the queue that was submitted with ``script``.

    An sbatch whose answer was lost, or somebody else's on another host, may have made it.
    """
    queue = sorted(slurm.queue(person()), key=lambda entry: -entry.job_id)
    for entry in queue[:_LOOKED_AT]:
        if entry.state not in TERMINAL:
            # Tasks of an array that wait share a line, and the record that goes by its id.
            record = slurm.show_job(entry.job_ref.partition("_[")[0])
            if record is not None and record.command == str(script):
                return record
    return None


def refuse_submitted(run: RunDirectory, slurm: Slurm) -> None:
    """``RunDirectoryError`` where Slurm has a job of a run that knows of none.

    Whoever submitted it was killed, or could not write, between sbatch and the journal.
    """
    if not run.exists() or not untouched(run):
        return
    record = job_of_script(job_script(run), slurm)
    if record is not None:
        job = str(record.array_job_id or record.job_id)
        via = "sbatch" if record.array_job_id is None else VIA_ARRAY
        note(run, Submitted(job=job, via=via))
        raise RunDirectoryError(
            f"{run.name} was submitted already, as job {job}",
            next_step=f"To see it: slurm-forge status {run.name}.",
        )
