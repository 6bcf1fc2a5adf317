"""Notes about an array of attempts before it is submitted."""

from __future__ import annotations

from slurm_forge.report.text import plural
from slurm_forge.spec import JobSpec
from slurm_forge.units import words_for_duration


def chain_outlook(job: JobSpec, *, comes_back: bool) -> tuple[str, ...]:
    """Sentences; none for a job that is no array.

    ``comes_back``: behind the last task the run may requeue itself.
    """
    if job.chain is None:
        return ()
    limit = job.resources.time
    tasks = plural(job.chain, "task")
    long = "as long as the partition allows" if limit is None else words_for_duration(limit)
    total = "" if limit is None else f", {words_for_duration(job.chain * limit)} in all"
    after = (
        "after the last one the run is requeued"
        if comes_back
        else "after the last one it is held, and slurm-forge requeue submits as many again"
    )
    return (
        f"an array of {tasks}, one at a time, each an attempt of {long}{total}: each task starts "
        f"when the previous one has ended; {after}. Unneeded tasks are cancelled.",
    )
