"""``--inject``: the faults of a command line, in addition to those of the job file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slurm_forge.cli.preparation import Checked

Inject = Annotated[
    list[str] | None,
    typer.Option(
        "--inject",
        metavar="FAULTS",
        help="Faults to inject, besides those of the job file: nan@120,oom@200:rank1,kill@350.",
    ),
]


def rehearsed(checked: Checked, texts: Sequence[str], *, ranks: int) -> Checked:
    """The job with these faults too, and all of its faults said aloud.

    ``ConfigError`` for what is no fault, or of a rank that is not there.
    """
    from slurm_forge.errors import ConfigError
    from slurm_forge.spec.faults import parse_faults

    job = checked.job
    injected = list(job.inject)
    for text in texts:
        try:
            injected += parse_faults(text)
        except ValueError as error:
            raise ConfigError(
                f"--inject: {error}",
                next_step="Write kind@step, such as --inject nan@120,kill@350:rank0.",
            ) from None
    faults = tuple(dict.fromkeys(injected))
    if not faults:
        return checked
    for fault in faults:
        if fault.rank is not None and fault.rank >= ranks:
            raise ConfigError(
                f"{fault}: there is no rank {fault.rank}",
                path=None if fault not in job.inject else checked.path,
                next_step=f"There are {ranks} ranks, counted from 0.",
            )
    notice = f"injected faults: {', '.join(map(str, faults))}"
    if job.entry is None:
        notice += "; in a command they strike only ranks that join the run (slurm_forge.attach)"
    return replace(
        checked,
        job=job.model_copy(update={"inject": faults}),
        doubts=(*checked.doubts, notice),
    )
