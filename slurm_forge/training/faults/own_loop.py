"""Which faults can be injected in a loop of the program's own; the others are refused."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_forge.errors import UnsupportedError
from slurm_forge.spec.faults import Fault, FaultKind


def require_injectable(faults: Iterable[Fault], *, world_size: int, guarded: bool) -> None:
    """Raise ``UnsupportedError`` for a fault that would never strike.

    ``guarded``: the gradients pass through ``run.apply``, which can change them after they are
    summed over the ranks, in the same way on all ranks.
    """
    for fault in faults:
        if fault.drags:
            raise _refused(
                fault, "run.advance() does not know which part of a step is this rank's own"
            )
        if not fault.of_batch:
            continue
        if not guarded:
            raise _refused(fault, "the loop steps its optimizer itself")
        if not fault.of_gradient:
            needs = "the forward pass" if fault.kind is FaultKind.OOM else "the samples"
            raise _refused(fault, f"run.apply() sees the gradients and not {needs}")
        if fault.rank is not None and world_size > 1:
            raise UnsupportedError(
                f"{fault} can't be injected in this loop: run.apply() sees gradients that are "
                "summed over the ranks already",
                next_step=f"Leave :rank{fault.rank} out, or take the step with run.step().",
            )


def _refused(fault: Fault, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{fault} can't be injected in this loop: {why}",
        next_step="Take the step with run.step() or run.train_step(), or leave the fault out of "
        "the job's inject.",
    )
