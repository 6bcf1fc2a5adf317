"""``init``: the first files of a run, by questions or by options."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from slurm_forge.cli.completion import site_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_forge.cli.start.first_files import (
        FirstFiles,
        InitOptions,
    )


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where they go; created if missing.")
    ] = Path(),
    way: Annotated[
        str | None,
        typer.Option(metavar="WAY", help="How the run is started (see below)."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run (default: the folder's).")
    ] = None,
    entry: Annotated[
        str | None,
        typer.Option(metavar="FILE:FUNCTION", help="Your own function instead of a new train.py."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            metavar="CMD", help="Your own program and its arguments, for exec and attach."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Nodes (1).")] = None,
    gpus_per_node: Annotated[
        str | None, typer.Option(metavar="N", help="GPUs per node: 4, a100:4.")
    ] = None,
    tasks_per_node: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks per node (default: one per GPU).")
    ] = None,
    cpus_per_task: Annotated[int | None, typer.Option(metavar="N", help="Cores per rank.")] = None,
    mem: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory per node: 64G.")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time limit of one attempt: 12h, 2-00:00:00.")
    ] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Partition.")] = None,
    account: Annotated[
        str | None, typer.Option(metavar="NAME", help="Account that is charged.")
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Site, for the commands shown.", autocompletion=site_names
        ),
    ] = None,
    template: Annotated[
        str | None, typer.Option(metavar="NAME", help="How ranks are started: srun, torchrun.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing, even in a terminal.")
    ] = False,
) -> None:
    """Write a commented job file and a training script that runs.

    In a terminal it asks for what no option gives.  Nothing is overwritten without --force.

    \b
    --way job         a job file and a function: slurm-forge submit (the default)
    --way submitit    the same function, submitted by a script with submitit
    --way exec        a program that knows nothing of slurm-forge, in your own sbatch script
    --way attach      your own script, started by srun or torchrun, that calls forge.attach()
    --way hf          a job file and a function that trains with Hugging Face's Trainer
    --way accelerate  the same with a loop that uses accelerate
    --way lightning   the same with Lightning's Trainer
    --way hydra       a script that Hydra configures, and sweeps of it
    --way keras       the same with Keras and its torch backend
    --way titan       the same with torchtitan's trainer, and its TOML file

    \b
    Examples:
      slurm-forge init demo
      slurm-forge init demo --yes --nodes 2 --gpus-per-node 4 --time 12h --partition preempt
      slurm-forge init --way exec --command "srun python train.py --lr 0.1"
    """
    from slurm_forge.cli.failure import fail
    from slurm_forge.cli.start.first_files import (
        InitOptions,
        StartMethod,
        first_files,
        name_from,
    )
    from slurm_forge.documents import did_you_mean
    from slurm_forge.errors import ConfigError, ForgeError

    known = [each.value for each in StartMethod]
    try:
        if way is not None and way not in known:
            raise ConfigError(
                f"--way: unknown value {way[:40]!r} {did_you_mean(way, known)}",
                next_step="slurm-forge init --help says what they are.",
            )
        of_command = StartMethod.JOB if command is None else StartMethod.EXEC
        options = InitOptions(
            start_method=of_command if way is None else StartMethod(way),
            name=name_from(folder) if name is None else name,
            entry=entry,
            command=command,
            site=site,
            template=template,
            nodes=nodes,
            tasks_per_node=tasks_per_node,
            gpus_per_node=gpus_per_node,
            cpus_per_task=cpus_per_task,
            mem=mem,
            time=time,
            partition=partition,
            account=account,
        )
        if not yes and sys.stdin.isatty() and sys.stdout.isatty():
            options = _prompted(options, known, ask_way=way is None, ask_name=name is None)
        made = first_files(options)
        _write(folder, made, force=force)
    except (ForgeError, OSError) as error:
        fail(error, "files may have been replaced." if force else "nothing was written.")
    _say(folder, made)


def _prompted(
    options: InitOptions, ways: list[str], *, ask_way: bool, ask_name: bool
) -> InitOptions:
    """Asks for what no option gave; repeats the question after a wrong answer."""
    from slurm_forge.cli.start.first_files import StartMethod

    typer.echo("Press Enter to accept the default in brackets.")
    own = options.entry is not None or options.command is not None
    if ask_way and not own:
        typer.echo("job: a job file and a function.  submitit: a script that submits with it.")
        typer.echo("exec: a program of yours as it is.  attach: a script of yours, as a run.")
        typer.echo("hf, lightning, keras, titan: a job file and a function with that trainer.")
        typer.echo("accelerate: the same with a loop.  hydra: a script that Hydra configures.")
        options = _one(
            options,
            "start_method",
            f"Way ({', '.join(ways)})",
            options.start_method.value,
            StartMethod,
        )
    if ask_name:
        options = _one(options, "name", "Name of the run", options.name, str)
    for key, question, default, read in _QUESTIONS:
        if getattr(options, key) is None:
            options = _one(options, key, question, default, read)
    return options


_QUESTIONS: tuple[tuple[str, str, str, Callable[[str], object]], ...] = (
    ("nodes", "Nodes", "1", int),
    ("gpus_per_node", "GPUs per node (0: none)", "0", str),
    ("time", "Time limit of one attempt", "12h", str),
    ("partition", "Partition (empty: Slurm's default)", "", str),
)


def _one(
    options: InitOptions, key: str, question: str, default: str, read: Callable[[str], object]
) -> InitOptions:
    from slurm_forge.cli.start.first_files import first_files
    from slurm_forge.errors import ForgeError

    while True:
        answer = typer.prompt(question, default=default, show_default=default != "").strip()
        if not answer:
            return options
        try:
            changed = replace(options, **{key: cast(Any, read(answer))})
            first_files(changed)
        except (ForgeError, ValueError) as error:
            typer.echo(f"  {error}" if isinstance(error, ForgeError) else f"  not {answer!r}")
            continue
        return changed


def _write(folder: Path, made: FirstFiles, *, force: bool) -> None:
    """All files; without ``force`` none, where one exists already or can't be written."""
    from slurm_forge.errors import ConfigError
    from slurm_forge.files import create_exclusive, write_atomic

    def there(names: list[str]) -> ConfigError:
        which = "they are" if len(names) > 1 else "it is"
        return ConfigError(
            f"{' and '.join(str(folder / name) for name in names)}: {which} there already",
            next_step="Give another folder, or write over what is there: --force.",
        )

    existing = [each.name for each in made.files if (folder / each.name).exists()]
    if existing and not force:
        raise there(existing)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        for each in made.files:
            path, data = folder / each.name, each.text.encode()
            if force:
                write_atomic(path, data, mode=0o664)
            elif create_exclusive(path, data, mode=0o664):
                undo.callback(path.unlink, missing_ok=True)
            else:
                raise there([each.name])
        undo.pop_all()


def _say(folder: Path, made: FirstFiles) -> None:
    import shlex

    typer.echo(f"wrote {', '.join(str(folder / each.name) for each in made.files)}")
    typer.echo("next:")
    if folder.resolve() != Path.cwd():
        typer.echo(f"  cd {shlex.quote(str(folder))}")
    width = max(len(made.local_command), len(made.cluster_command))
    typer.echo(f"  {made.local_command:<{width}}   # here, without Slurm")
    typer.echo(f"  {made.cluster_command:<{width}}   # on the cluster")
