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
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from slurm_forge.cli.failure import fail
from slurm_forge.errors import ForgeError

#: The verbs in the order of the help, and the module of each below ``slurm_forge.cli``.
_MODULES = {
    "init": "start.init",
    "doctor": "cluster.doctor",
    "submit": "start.submit",
    "render": "start.submit",
    "run": "start.run",
    "exec": "start.exec",
    "status": "observe.status",
    "explain": "observe.status",
    "logs": "observe.logs",
    "top": "monitoring.top",
    "report": "observe.report",
    "watch": "observe.watch",
    "notify": "observe.notify",
    "metrics": "monitoring.metrics",
    "trace": "monitoring.trace",
    "requeue": "requests",
    "extend": "start.change",
    "change": "start.change",
    "fork": "start.fork",
    "reconcile": "requests",
    "stop": "requests",
    "save": "requests",
    "checkpoints": "checkpoints.checkpoints",
    "export": "checkpoints.export",
    "probe": "cluster.probe",
    "nodes": "cluster.nodes",
    "policy": "start.policy",
    "config": "start.config",
    "sites": "cluster.sites",
}
#: Those with verbs of their own: ``app`` of the module.
_GROUPS = frozenset({"checkpoints", "nodes", "policy", "config", "sites"})
#: Where the function can't have the name of the verb.
_FUNCTIONS = {"exec": "execute"}
#: What follows the program's name is the program's, whatever it looks like.
_SETTINGS = {"exec": {"allow_interspersed_args": False}}
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


def _version(wanted: bool) -> None:
    if wanted:
        # By name: a plain import would count as one of everything that the package can load.
        typer.echo(f"slurm-forge {import_module('slurm_forge').__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version


def application(verb: str | None = None) -> typer.Typer:
    """The command line.

    Args:
        verb: The only one to be known; without it all are, which takes ten times as long.

    Returns:
        What parses the words of the command line and runs the verb.
    """
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
    app.callback()(_options)
    for name in _MODULES if verb is None else (verb,):
        module = import_module(f"slurm_forge.cli.{_MODULES[name]}")
        if name in _GROUPS:
            app.add_typer(module.app)
        else:
            settings = _SETTINGS.get(name)
            app.command(name, context_settings=settings)(
                getattr(module, _FUNCTIONS.get(name, name))
            )
    return app


def main() -> None:
    """Run the command line and exit with its status."""
    # A command makes values and ends: to look for garbage among them takes a quarter of its time.
    gc.set_threshold(200_000, 50, 50)
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that can't show an arrow gets a question mark, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    application(first if first in _MODULES else None)()


def _open_closed() -> None:
    """What was closed (``>&-``) is written to nowhere: else some file of ours would be 1 or 2."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # What is started from here finds it open too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or os.fdopen(os.dup(1), "w")
    sys.stderr = sys.stderr or os.fdopen(os.dup(2), "w")


if __name__ == "__main__":
    main()
