"""``export``: a checkpoint as a file that needs no slurm_forge."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from slurm_forge.cli.checkpoints.run_checkpoints import (
    open_run,
)
from slurm_forge.cli.completion import run_names
from slurm_forge.cli.options import AsJson, Runs
from slurm_forge.process import process_words


class Kind(str, Enum):
    """The file formats."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


_SUFFIXES = {
    ".safetensors": Kind.SAFETENSORS,
    ".pt": Kind.TORCH,
    ".pth": Kind.TORCH,
    ".bin": Kind.TORCH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """What ``export`` prints with ``--json``; ``notes`` say what was omitted."""

    path: str
    format: str
    tensors: int
    size: int
    notes: tuple[str, ...]


def export(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Name of a run, or the path of its folder.",
            autocompletion=run_names,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="A .safetensors, .pt, .pth or .bin file; else a folder of DCP."
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="Instead of a run: a folder that dcp.save wrote."
        ),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(metavar="CHECKPOINT", help="A name, a step, latest, good or next.")
    ] = "next",
    only: Annotated[
        str, typer.Option(metavar="NAME,...", help="Registered objects (default: the models).")
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Every tensor, including optimizers and random states.")
    ] = False,
    kind: Annotated[
        Kind | None,
        typer.Option("--format", help="File format (default: by the name of the file)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    json: AsJson = False,
    runs: Runs = None,
) -> None:
    """Write a checkpoint as one plain file.

    safetensors, torch.load or plain DCP open it.  A single model's tensors are named as its
    load_state_dict expects them.  safetensors takes memory for the largest tensor only;
    torch and DCP hold all that is written.  Needs torch.

    \b
    Examples:
      slurm-forge export tiny-gpt --to tiny-gpt.safetensors
      slurm-forge export tiny-gpt --checkpoint good --to tiny-gpt.pt
      slurm-forge export --from elsewhere/step-1000 --to model.safetensors
    """
    from slurm_forge.report.encoding import to_json

    if to is None:
        raise typer.BadParameter("say where to: --to PATH", param_hint="--to")
    if (run is None) == (source is None):
        raise typer.BadParameter("name a run, or a folder of DCP with --from; one of the two")
    words = ["--to", str(to.expanduser().absolute())]
    words += ["--format", (kind or _SUFFIXES.get(to.suffix.lower(), Kind.DCP)).value]
    for name in filter(None, (each.strip() for each in only.split(","))):
        words += ["--only", name]
    words += ["--all"] * everything + ["--force"] * force
    if run is not None:
        words += _of_run(run, checkpoint, runs)
    else:
        words += ["--plain", str(Path(source or "").expanduser().absolute())]
    done = _child(words)
    if json:
        typer.echo(to_json(done))
        return
    _print_result(done)


def _of_run(run: str, checkpoint: str, runs: Path | None) -> list[str]:
    opened = open_run(run, runs)
    name = opened.meant(checkpoint)
    doubt = opened.state.refusal(name)
    if doubt is not None:
        typer.echo(f"note: {name} is not resumed from: {doubt}", err=True)
    folder, run_id = opened.store.path(name).parent, opened.store.run_id
    return ["--checkpoints", str(folder), "--run-id", run_id, "--name", str(name)]


def _child(words: list[str]) -> ExportSummary:
    """Run the export in a process with torch, since this one starts without."""
    import json
    import signal
    import subprocess
    import tempfile

    from slurm_forge.cli.failure import (
        FAILED,
        INTERRUPTED,
    )
    from slurm_forge.cli.progress import bar
    from slurm_forge.errors import CheckpointError
    from slurm_forge.knobs import process_environ

    _need("torch")
    # Not from here: a torch.py that lies in this folder would be taken for the real one.
    command = [sys.executable, *process_words("export", *words, "--progress")]
    environment = _from_anywhere(process_environ())
    out = b""
    # What it writes on standard error is printed when the bar is gone.
    with tempfile.TemporaryFile() as complaints:
        try:
            with (
                bar("export", of_bytes=True) as shown,
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=complaints, cwd="/", env=environment
                ) as child,
            ):
                try:
                    for out in child.stdout or ():
                        told = json.loads(out)
                        if "done" in told:
                            shown.reach(told["done"], told["total"])
                except KeyboardInterrupt:  # the child has been interrupted too, and cleans up
                    child.wait()
                    raise typer.Exit(INTERRUPTED) from None
        finally:
            complaints.seek(0)
            typer.echo(complaints.read().decode(errors="replace"), nl=False, err=True)
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise CheckpointError(
            f"the export was ended by {name}",
            next_step="If memory was short, write a .safetensors file: it takes the least.",
        )
    if child.returncode != 0:
        raise typer.Exit(FAILED)  # it has said why
    summary = json.loads(out)
    return ExportSummary(**{**summary, "notes": tuple(summary["notes"])})


def _from_anywhere(variables: Mapping[str, str]) -> dict[str, str]:
    """The same variables for a process in another folder: Python looks where it would from here.

    An empty entry means this folder, mostly by mistake (``$UNSET:/there``), and is dropped.
    """
    environment = dict(variables)
    entries = [each for each in environment.pop("PYTHONPATH", "").split(os.pathsep) if each]
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(each).absolute()) for each in entries)
    return environment


def _need(package: str) -> None:
    from importlib.util import find_spec

    from slurm_forge.errors import UnsupportedError

    if find_spec(package) is None:
        raise UnsupportedError(
            f"export needs {package}, which {sys.executable} does not have",
            next_step="Use the Python that the run trains with: its slurm-forge, or "
            "python -m slurm_forge export ….",
        )


def _print_result(done: ExportSummary) -> None:
    from slurm_forge.report import text as t
    from slurm_forge.report.checkpoints_text import amount

    for note in done.notes:
        typer.echo(f"note: {t.clean(note, 400)}", err=True)
    count = t.plural(done.tensors, "tensor")
    typer.echo(f"{done.path}: {count}, {amount(done.size)} ({done.format})")
