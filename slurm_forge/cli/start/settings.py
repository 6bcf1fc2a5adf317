"""``--set KEY=VALUE``: values of the command line, which override all files."""

from __future__ import annotations

from typing import Annotated

import typer

from slurm_forge.cli.completion import setting_keys

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the job file, overriding all files: recovery.cuda_oom.times=2. "
        "Repeatable.",
        autocompletion=setting_keys,
    ),
]
