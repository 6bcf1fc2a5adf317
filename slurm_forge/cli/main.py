"""Entry point of ``slurm-forge``.

Exit status: 0 it worked (for ``run``: the run is finished); 1 the run of ``run`` did not finish,
``checkpoints verify`` found a damaged one, or ``watch --once`` something new for a person;
2 it could not be done, or not be understood: nothing was changed but what the message says;
130 interrupted from the keyboard.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from slurm_forge.cli import requests as asking
from slurm_forge.cli.checkpoints import checkpoints
from slurm_forge.cli.checkpoints import export as exporting
from slurm_forge.cli.cluster import (
    doctor,
    nodes,
    probe,
    sites,
)
from slurm_forge.cli.failure import fail
from slurm_forge.cli.observe import status as looking
from slurm_forge.cli.observe import watch
from slurm_forge.cli.start import change as changing
from slurm_forge.cli.start import (
    config,
    policy,
)
from slurm_forge.cli.start import exec as executing
from slurm_forge.cli.start import fork as forking
from slurm_forge.cli.start import init as beginning
from slurm_forge.cli.start import run as running
from slurm_forge.cli.start import submit as submitting
from slurm_forge.errors import ForgeError

_EPILOG = (
    "Exit status: 0 it worked (for run: the run is finished), 1 the run did not finish, a "
    "checkpoint is damaged or watch has news, 2 it could not be done, 130 interrupted; of exec: "
    "see exec --help."
)


class ForgeGroup(TyperGroup):
    """Turns our errors and the operating system's into messages, whatever the verb."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `slurm-forge explain x | head`: the framework ends quietly
        except (ForgeError, OSError) as error:
            fail(error)


app = typer.Typer(
    name="slurm-forge",
    cls=ForgeGroup,
    help="Training runs that finish by themselves on any Slurm cluster.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=True,
    # Plain text starts faster than boxes, and it can be pasted.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(beginning.init)
app.command()(doctor.doctor)
app.command()(submitting.submit)
app.command()(submitting.render)
app.command()(running.run)
# What follows the program's name is the program's, whatever it looks like.
app.command("exec", context_settings={"allow_interspersed_args": False})(executing.execute)
app.command()(looking.status)
app.command()(looking.explain)
app.command()(watch.watch)
app.command()(asking.requeue)
app.command()(changing.extend)
app.command()(changing.change)
app.command()(forking.fork)
app.command()(asking.reconcile)
app.command()(asking.stop)
app.command()(asking.save)
app.add_typer(checkpoints.app)
app.command()(exporting.export)
app.command()(probe.probe)
app.add_typer(nodes.app)
app.add_typer(policy.app)
app.add_typer(config.app)
app.add_typer(sites.app)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import import_module

        # By name: a plain import would count as one of everything that the package can load.
        typer.echo(f"slurm-forge {import_module('slurm_forge').__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command line and exit with its status."""
    # A command makes values and ends: to look for garbage among them takes a quarter of its time.
    gc.set_threshold(200_000, 50, 50)
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that can't show an arrow gets a question mark, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()


def _open_closed() -> None:
    """What was closed (``>&-``) is written to nowhere: else some file of ours would be 1 or 2."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(os.dup(1), "w")
    sys.stderr = sys.stderr or os.fdopen(os.dup(2), "w")


if __name__ == "__main__":
    main()
