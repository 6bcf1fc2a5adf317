"""``exec``: a command that knows nothing of slurm_forge, brought back until it is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slurm_forge.run_directory import RunDirectory


def execute(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- CMD …", help="The program and its arguments.", show_default=False
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the run; else the Slurm job's."),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(
            "--job", metavar="JOB.yaml", help="Job file: recovery ladders, program:, name."
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs", metavar="DIR", help="Folder of runs (default: SLURM_FORGE_RUNS, ./runs)."
        ),
    ] = None,
    convention: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Signal convention: plain, torchrun, lightning, hf, submitit, accelerate.",
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(metavar="SIGNAL", help="Signal that makes the program save (TERM)."),
    ] = None,
    notify_to: Annotated[
        str | None,
        typer.Option(
            metavar="WHOM",
            help="Who gets it: child, group, ranks (tasks of steps), tree (leaf processes).",
        ),
    ] = None,
    notify_again: Annotated[
        bool,
        typer.Option("--notify-again", help="Also processes that Slurm has already signalled."),
    ] = False,
    lead: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Notice before the time limit, such as 120s."),
    ] = None,
    checkpoint_glob: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="The program's checkpoints: 'out/checkpoint-*'."),
    ] = None,
    resume_arg: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="Appended from the second start on: '--resume {latest}'. Fields: latest, "
            "attempt, launch, restarts, run_dir.",
        ),
    ] = None,
    progress_file: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Files that show progress (default: the checkpoints)."),
    ] = None,
    step_pattern: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help=r"Finds the step in its output: 'step (\d+)'."),
    ] = None,
    metric_pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=REGEX",
            help=r"Finds step, loss, grad_norm in its output: 'loss=loss: (\S+)', or a preset: hf, "
            "lightning, keras, torchtitan, kempnerforge, plain. Repeatable.",
        ),
    ] = None,
    progress_after: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Without either: a start that ran this long made progress (10m)."
        ),
    ] = None,
    done_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File that exists once the program is done.")
    ] = None,
    done_pattern: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Output that says it is done.")
    ] = None,
    done_exit_code: Annotated[
        int | None, typer.Option(metavar="N", help="Exit code that says it is done.")
    ] = None,
    requeue_exit_code: Annotated[
        int | None, typer.Option(metavar="N", help="Exit code that asks for a restart.")
    ] = None,
) -> None:
    """Run a command until it is done: in your own sbatch script, or here.

    The command is signalled when Slurm wants the nodes, given the remaining time, restarted
    or requeued within budgets, and resumes by its own means.  Exit code 0 means done, unless
    it was signalled to stop.  Write it as the last line of the script, with exec in front:

    exec slurm-forge exec --name big -- srun python train.py

    Exit status: 0 done, requeued, held or stopped by a user (so that a script with set -e
    continues); the command's own where it failed for good and is not brought back (without
    Slurm, or where the job file says raise); 2 a wrong command line, nothing was started;
    130, 143 a signal from a user, without Slurm.

    \b
    Examples:
      slurm-forge exec --name big -- srun python train.py
      slurm-forge exec --name big --convention torchrun -- torchrun train.py
      slurm-forge exec --job train.yaml -- srun python train.py --lr 0.1
    """
    import sys

    from slurm_forge.cli.failure import fail
    from slurm_forge.cli.run_choice import (
        runs_folder,
        site_places,
    )
    from slurm_forge.errors import ForgeError
    from slurm_forge.knobs import Knobs, process_environ
    from slurm_forge.launch.attempt.failed_start import (
        report_failed_start,
        reporting_failed_start,
    )
    from slurm_forge.launch.command.main import (
        VIA_EXEC,
        execute,
    )
    from slurm_forge.launch.submit.command_runs import (
        open_run,
        program_job,
        settings_of_run,
    )
    from slurm_forge.run_directory import RunDirectory
    from slurm_forge.site.loading import GENERIC
    from slurm_forge.slurm.client import SubprocessSlurm
    from slurm_forge.slurm.environment import SlurmEnvironment

    variables = dict(process_environ())
    try:
        environment = SlurmEnvironment.from_environ(variables)
        # A later start of the job must find the run, whatever settings were changed meanwhile.
        folder = runs_folder(runs, begun=True)
        knobs = Knobs.from_environ(variables)
        checked, below = program_job(
            command or [],
            name=name,
            path=job,
            job_name=_job_name(environment),
            options={
                "convention": convention,
                "notify": notify,
                "notify_to": notify_to,
                "notify_again": notify_again,
                "checkpoint_glob": checkpoint_glob,
                "resume_arg": resume_arg,
                "progress_file": progress_file,
                "step_pattern": step_pattern,
                "metric_pattern": tuple(metric_pattern) if metric_pattern else None,
                "progress_after": progress_after,
                "done_file": done_file,
                "done_pattern": done_pattern,
                "done_exit_code": done_exit_code,
                "requeue_exit_code": requeue_exit_code,
            },
            lead=lead,
            settings=lambda of: settings_of_run(RunDirectory.at(folder / of), job, knobs),
        )
        _refuse_missing(checked.command or (), folder / checked.name)
        places = site_places(begun=(folder / checked.name / "run.yaml").is_file())
        site = (
            places.load(GENERIC)
            if environment is None
            else places.load(cluster_name=environment.cluster_name)
        )
        run, _ = open_run(
            checked,
            runs=folder.absolute(),
            site=site.site,
            folder=Path.cwd(),
            partition=None if environment is None else environment.partition,
            settings=below,
        )
    except (ForgeError, OSError) as error:
        if isinstance(error, ForgeError):
            report_failed_start(None if name is None else _begun(name, runs), variables, error)
        fail(error, "nothing was started.")
    with reporting_failed_start(run, variables):
        status = execute(
            run,
            environment=environment,
            variables=variables,
            slurm=None if environment is None else SubprocessSlurm.of_this_process(),
            via=VIA_EXEC,
        )
    sys.stdout.flush()
    raise typer.Exit(status)


def _begun(name: str, runs: Path | None) -> RunDirectory | None:
    """The run of that name, if an earlier start created it."""
    from slurm_forge.cli.run_choice import runs_folder
    from slurm_forge.errors import ForgeError
    from slurm_forge.run_directory import RunDirectory

    try:
        return RunDirectory.existing(runs_folder(runs, begun=True) / name)
    except (ForgeError, OSError):
        return None


def _refuse_missing(command: Sequence[str], run: Path) -> None:
    """Refuse a missing program before a run is created; later this node may be to blame."""
    import shutil

    from slurm_forge.errors import ConfigError

    if not (run / "run.yaml").is_file() and shutil.which(command[0]) is None:
        raise ConfigError(
            f"there is no program {command[0]!r} here",
            next_step="Write the command after -- as you would type it; your own script needs its "
            "path (./train.sh), and shell syntax needs a shell: -- bash -c '…'",
        )


def _job_name(environment: object) -> str:
    """The Slurm job's name, for a run without one; each task of an array is a run of its own."""
    from slurm_forge.slurm.environment import SlurmEnvironment

    if not isinstance(environment, SlurmEnvironment):
        return ""
    task = environment.array_task_id
    return environment.job_name if task is None else f"{environment.job_name}-{task}"
