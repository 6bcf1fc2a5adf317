"""Skipped steps: counted on every rank alike, written down, and after too many the launch ends."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from slurm_forge.control import Member
from slurm_forge.control.protocol import Recover
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import StepSkipped
from slurm_forge.recovery.decide import skips_allowed
from slurm_forge.training.context import RankContext
from slurm_forge.training.guard import Applied
from slurm_forge.training.hooks import Hooks
from slurm_forge.training.progress import Progress
from slurm_forge.training.registry import Registry
from slurm_forge.vocabulary.cause import Cause, Confidence, Evidence
from slurm_forge.vocabulary.decision import Action, Incident

__all__ = ["LaunchGivenUp", "Skips"]


class LaunchGivenUp(BaseException):
    """All ranks leave without saving: what is on disk is better than what is in memory."""


class Skips:
    """Takes the verdict of every step in; raises ``LaunchGivenUp`` on all ranks together.

    With ``late`` (on a GPU) a verdict is read one step later, when it has long arrived on the host:
    no step waits for the device.  ``let_land`` waits for a save in flight before all is given up.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        progress: Progress,
        registry: Registry,
        hooks: Hooks,
        journal: JournalWriter | None,
        member: Member,
        group: dist.ProcessGroup | None,
        let_land: Callable[[], None],
        late: bool,
    ) -> None:
        self._context = context
        self._progress = progress
        self._registry = registry
        self._hooks = hooks
        self._journal = journal
        self._member = member
        self._group = group
        self._let_land = let_land
        self._keep = 1 if late else 0
        self._limit = max(1, skips_allowed(context.spec.recovery, Cause.NON_FINITE))
        self._unread: deque[tuple[Sequence[Applied], StepSkipped, tuple[str, ...]]] = deque()

    def taken(
        self, applied: Sequence[Applied], if_skipped: StepSkipped, unprotected: tuple[str, ...]
    ) -> None:
        """A step has been taken, or not: the device knows.

        ``unprotected`` are buffers that the step changed and that nothing can put back.
        """
        self._unread.append((applied, if_skipped, unprotected))
        self._read(self._keep)

    def read_all(self) -> None:
        """Wait for every verdict that is still on its way: before a save."""
        self._read(0)

    def _read(self, keep: int) -> None:
        while len(self._unread) > keep:
            applied, if_skipped, unprotected = self._unread.popleft()
            if any(each.skipped() for each in applied):
                self._skipped(if_skipped, unprotected)
            else:
                self._progress.skipped_in_a_row = 0

    def _skipped(self, what: StepSkipped, unprotected: tuple[str, ...]) -> None:
        """Every rank comes here together: the verdict rests on the norm over all ranks."""
        progress = self._progress
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        if self._journal is not None:
            with contextlib.suppress(OSError):  # rank 0 alone must not fail over a line about it
                self._journal.write(
                    StepSkipped(
                        step=what.step,
                        first_sample=what.first_sample,
                        samples=what.samples,
                        consecutive=progress.skipped_in_a_row,
                    )
                )
        if unprotected:
            # The update was skipped, and yet the model is not what it was.
            names = ", ".join(unprotected[:3])
            self._give_up(what.step, f"a non-finite gradient, and {names} can't be put back")
        scaler = self._registry.scaler
        if scaler is not None and scaler.get_scale() > 1.0:
            return  # a scaler that still has room below looks for its scale: that is no incident
        if progress.skipped_in_a_row < self._limit:
            return
        text = f"{progress.skipped_in_a_row} steps in a row had a non-finite gradient"
        if self._hook_says_go_on(what.step, text):
            progress.skipped_in_a_row = 0
            return
        self._give_up(what.step, text)

    def _give_up(self, step: int, text: str) -> NoReturn:
        self._let_land()
        self._member.send(Recover(cause=Cause.NON_FINITE.value, step=step, text=text))
        raise LaunchGivenUp

    def _hook_says_go_on(self, step: int, text: str) -> bool:
        """Rank 0 asks the program's hook; all ranks hear the answer (only after an incident)."""
        brief = self._context.brief
        incident = Incident(
            id=f"{brief.attempt}.{brief.launch}.hook",
            cause=Cause.NON_FINITE,
            confidence=Confidence.CERTAIN,
            evidence=(Evidence("gradient norm", text),),
            step=step,
        )
        decision = self._hooks.instability(incident)
        go_on = decision is not None and decision.action in (Action.SKIP, Action.WARN)
        if self._group is None:
            return go_on
        flag = torch.tensor([int(go_on)])
        dist.broadcast(flag, group_src=0, group=self._group)
        return bool(flag.item())
