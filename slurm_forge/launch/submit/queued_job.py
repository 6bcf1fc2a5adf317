"""The job that a script was submitted as, where the answer of sbatch was lost."""

from __future__ import annotations

from pathlib import Path

from slurm_forge.errors import RunDirectoryError, SubmissionError
from slurm_forge.journal.events import Submitted
from slurm_forge.launch.render.array_chain import VIA_ARRAY
from slurm_forge.launch.submit.submission import job_script, note, untouched
from slurm_forge.person import person
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import Slurm
from slurm_forge.slurm.records import JobRecord
from slurm_forge.slurm.states import TERMINAL

#: Jobs and arrays that are looked at, one question to Slurm each.
_LOOKED_AT = 100


def job_of_script(script: Path, slurm: Slurm) -> JobRecord | None:
    """The person's newest job in the queue that was submitted with ``script``.

    An sbatch whose answer was lost, or somebody else's on another host, may have made it.

    Raises:
        SubmissionError: The queue is too long to be searched.
    """
    waiting = [entry for entry in slurm.queue(person()) if entry.state not in TERMINAL]
    # All tasks of an array have one script.
    arrays = {entry.job_ref.partition("_")[0]: entry for entry in waiting}
    for entry in sorted(arrays.values(), key=lambda each: -each.job_id)[:_LOOKED_AT]:
        # Tasks that wait share a line, and the record that goes by the id of the array.
        record = slurm.show_job(entry.job_ref.partition("_[")[0])
        if record is not None and record.command == str(script):
            return record
    if len(arrays) > _LOOKED_AT:
        raise SubmissionError(
            f"whether {script} was submitted can't be told: of the {len(arrays)} jobs in the queue "
            f"the newest {_LOOKED_AT} are others",
            next_step="See whether squeue --me --format='%i %o' lists the script.  Try again when "
            "fewer jobs are in the queue.",
        )
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
