"""``slurm_forge.submit``: from Python, one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.launch.nodes.excluded_nodes import exclusion_now
from slurm_forge.launch.render.site_choice import (
    find_site,
    site_places,
)
from slurm_forge.launch.submit.importing import (
    module_of,
    path_of_job,
    refuse_not_importable,
)
from slurm_forge.launch.submit.queued_job import refuse_submitted
from slurm_forge.launch.submit.submission import (
    create_run,
    entry_of,
    submit_script,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.slurm.client import Slurm, SubprocessSlurm
from slurm_forge.spec import job_from_mapping
from slurm_forge.spec.entry import (
    check_entry,
    require_arguments,
)


def submit(
    train: Callable[..., Any] | str,
    spec: Mapping[str, Any],
    *,
    runs: Path | str = "runs",
    site: str | None = None,
    slurm: Slurm | None = None,
) -> RunDirectory:
    """Make a run of a training function and submit it to Slurm.

    Args:
        train: A function at the top of a module, or ``module:function``.
        spec: The keys of a job file, without ``entry``; ``name`` is required.
        runs: The folder of runs, on storage that all nodes see.
        site: The name or file of the site; None finds it as the command line does.
        slurm: How Slurm's commands are called; None calls those on ``PATH``.

    Returns:
        The run directory; ``slurm-forge status`` and ``explain`` take its name.

    Raises:
        ConfigError: A key, a value, or the function's parameters do not fit.
        SubmissionError: A job would not find the module of the function.
        RunDirectoryError: A run of that name has begun, or its directory cannot be made.
        SlurmCommandError: sbatch refused the job; nothing was submitted.
        SlurmUnreachableError: Slurm did not answer, so that the job may be in the queue.
    """
    entry = train if isinstance(train, str) else entry_of(train)
    job = job_from_mapping({**spec, "entry": entry})
    if isinstance(train, str):
        check_entry(entry, Path.cwd(), None, list(job.args))
    else:
        require_arguments(train, list(job.args))
        module = module_of(train)
        if module is not None:
            refuse_not_importable(module, path_of_job(Path.cwd()), Path.cwd())
    client = slurm or SubprocessSlurm.of_this_process()
    loaded_site = find_site(site, client)
    refuse_submitted(RunDirectory.at(Path(runs) / job.name), client)
    run, file = create_run(
        job,
        runs=Path(runs),
        site=loaded_site,
        submitted_from=Path.cwd(),
        site_file=site_places().named_file(site),
    )
    left_out = exclusion_now(client, job, loaded_site, Knobs.from_environ(process_environ()))
    exclude = left_out.exclude if left_out.nodes else ()
    submit_script(run, file, loaded_site, client, exclude=exclude)
    return run
