"""What became of one training: read from its curve, and from the journal where there is one."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.poison_train import CURVE, FINAL, Setup
from slurm_forge.journal import fold, read_journal
from slurm_forge.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Visit:
    """A step that was computed: a step comes again after a rollback.  ``loss`` may be NaN."""

    step: int
    first: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """``val`` is the loss per character on held-out text; None where it is not finite.

    ``poisoned`` counts updates made with poisoned samples that are in the final weights,
    ``repeated`` the steps that were computed again and ``repeated_s`` what they and the rollbacks
    took.  ``left_out`` are samples, ``left_out_good`` those of them that were not poisoned.
    """

    val: float | None
    ended: str
    poisoned: int
    incidents: tuple[str, ...] = ()
    rollbacks: tuple[tuple[int, int], ...] = ()
    skipped_steps: int = 0
    left_out: int = 0
    left_out_good: int = 0
    repeated: int = 0
    repeated_s: float = 0.0
    seconds: float = 0.0
    curve: tuple[Visit, ...] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Everything, with null for what is not finite."""
        found = {name: getattr(self, name) for name in self.__slots__ if name != "curve"}
        curve = [[v.step, v.first, v.loss if math.isfinite(v.loss) else None] for v in self.curve]
        return {**found, "curve": curve}


def read_ending(
    setup: Setup, folder: Path, *, ended: str | None = None, skips: bool = False
) -> Ending:
    """Of a training whose files are in ``folder``; ``ended`` where there is no journal.

    ``skips``: that one made no update where the loss was not finite.
    """
    curve = _curve(folder / CURVE)
    final = folder / FINAL
    val = json.loads(final.read_text()) if final.is_file() else None
    first, stop = setup.poison.first, setup.poison.first + setup.poison.batches
    window = range(first * setup.batch, stop * setup.batch)
    inside = () if setup.poison.garbage is None else window
    seconds = sum(visit.seconds for visit in curve)
    if ended is not None:
        applied = [visit for visit in curve if not skips or math.isfinite(visit.loss)]
        poisoned = sum(visit.first in inside for visit in applied)
        return Ending(val=val, ended=ended, poisoned=poisoned, curve=curve, seconds=seconds)
    state = fold(read_journal(RunDirectory.existing(folder))[0])
    seen = [skip for attempt in state.attempts for skip in attempt.skipped]
    not_applied = {(skip.step - 1, skip.first_sample) for skip in seen}
    plan = state.plan.skipped
    left_out = [sample for w in plan for sample in range(w.first, w.stop)]
    backwards = [(a.step, b.step) for a, b in itertools.pairwise(curve) if b.step <= a.step]
    again = _again(curve)
    return Ending(
        val=val,
        ended=f"{state.status.value}{f': {state.reason}' if val is None else ''}",
        poisoned=sum(
            visit.first in inside and (visit.step, visit.first) not in not_applied
            for visit in kept(curve)
        ),
        incidents=tuple(
            f"{seen.cause.value} at step {seen.step}"
            for attempt in state.attempts
            for _, seen in attempt.incidents
        ),
        rollbacks=tuple(backwards),
        skipped_steps=len(seen),
        left_out=len(left_out),
        left_out_good=sum(sample not in window for sample in left_out),
        repeated=len(again),
        repeated_s=sum(visit.seconds for visit in again),
        seconds=seconds,
        curve=curve,
    )


def kept(curve: Sequence[Visit]) -> list[Visit]:
    """The steps that the final weights come from: each one's last visit."""
    last = {visit.step: visit for visit in curve}
    return [last[step] for step in sorted(last)]


def _again(curve: Sequence[Visit]) -> list[Visit]:
    highest, found = -1, []
    for visit in curve:
        if visit.step <= highest:
            found.append(visit)
        highest = max(highest, visit.step)
    return found


def _curve(path: Path) -> tuple[Visit, ...]:
    found: list[Visit] = []
    before: float | None = None
    for line in path.read_text().splitlines():
        said = json.loads(line)
        loss = math.nan if said["loss"] is None else said["loss"]
        seconds = 0.0 if before is None else said["at"] - before
        before = said["at"]
        found.append(Visit(said["step"], said["first"], loss, seconds))
    return tuple(found)
