"""Watches losses and gradient norms on rank 0, and proposes consequences to all ranks.

``recovery.monitor.loss_anomaly`` decides what is unusual; policy, clock and channel are here.  Only
rank 0 looks, because floats may differ in the last bit: what all ranks do about it is agreed on for
a later step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import RequestProposal
from slurm_forge.errors import ControlChannelError
from slurm_forge.recovery.monitor.loss_anomaly import (
    Anomaly,
    Spikes,
    announce,
)
from slurm_forge.recovery.policy.decide import skips_allowed
from slurm_forge.spec.recovery import Recovery
from slurm_forge.training.step.gradient_guard import LARGEST
from slurm_forge.vocabulary.cause import Cause

#: Minimum interval between announcements of a higher limit; each requires all ranks to agree on a
#: step.  A lower limit has time: one that is too high does no harm.
_LIMIT_EVERY_S = 10.0
_LOWER_EVERY_S = 60.0
_HIGHER = 1.25
_LOWER = 0.5
#: Norms that rise this fast are not limited by a value that was right a moment ago: it is lifted.
_OUTGROWN = 2.0
#: An announcement takes effect within a few steps; after this many it must have been lost.
_LOST_AFTER_STEPS = 32
#: Steps that take this long are watched one by one, others in groups of at most this many.
_LONG_S = 0.1
_TOGETHER = 8
#: In effect no limit: on the device norms are float32.
_NO_LIMIT = 1e38
#: Single outliers are reported together.
_OUTLIERS_EVERY_S = 600.0


class SpikeMonitor:
    """On rank 0 only.  ``record`` is called for each step, in order, at least one step late.

    Steps that are skipped because a gradient is not finite are left to ``SkipTracker``.
    With an empty ladder for loss spikes nothing is watched; without a skip rung no norm is limited.
    Without ``noted`` single outliers are not reported.
    """

    def __init__(
        self,
        member_send: Callable[[Message], None],
        policy: Recovery,
        clock: Callable[[], float] = time.monotonic,
        *,
        noted: Callable[[str], None] | None = None,
        may_go_back: Callable[[], bool] = lambda: True,
    ) -> None:
        ladder = policy.ladder(Cause.LOSS_SPIKE)
        skips = skips_allowed(policy, Cause.LOSS_SPIKE)
        self._send = member_send
        self._clock = clock
        self._noted = noted
        self._may_go_back = may_go_back
        self._enabled = bool(ladder)
        self._limits_norm = skips > 0
        #: The last proposal, until it has been decided on.
        self.open: Anomaly | None = None
        self._spikes = Spikes(skips=skips)
        self._active_limit = math.inf
        #: The limit that was announced but is not in effect yet, and since which step.
        self._announced: tuple[float, int] | None = None
        self._next_limit_at = self._next_lower_at = -math.inf
        self._told_outliers = 0
        self._next_outliers_at = -math.inf

    def record(self, step: int, *, norm: float, loss: float, applied: bool) -> None:
        """The verdict of a step has been read.  Microseconds, unless there is something to do."""
        if not self._enabled:
            return
        spikes = self._spikes
        anomaly = spikes.note(step, loss=loss, norm=norm, applied=applied)
        if anomaly is not None:
            self._on_anomaly(anomaly)
        if self._limits_norm:
            limit = spikes.limit
            self._look_at_limit(math.inf if limit is None else limit, step)
        if spikes.outliers != self._told_outliers:
            self._tell_outliers()

    def restarted(
        self, losses: Sequence[float], step: int, *, highest_usual_loss: float | None = None
    ) -> None:
        """After a resume or rollback to ``step``; ``losses`` are its last ones, oldest first.

        No limit is in effect then: it depends on the weights that it was learned from.
        """
        self.open = None
        if highest_usual_loss is not None:
            self._spikes.highest_usual_loss = max(
                self._spikes.highest_usual_loss, highest_usual_loss
            )
        self._spikes.restart(losses, step)
        self.set_active_limit(None)

    def set_active_limit(self, value: float | None) -> None:
        """All ranks skip updates above this norm from now on; None or infinity: no limit."""
        self._active_limit = value if value is not None and value < _NO_LIMIT else math.inf
        self._announced = None

    def tolerate(self) -> None:
        """An anomaly was accepted: the present values are usual from now on."""
        self.open = None
        self._spikes.tolerate()

    @property
    def highest_usual_loss(self) -> float | None:
        """The highest usual loss so far; stored in checkpoints."""
        highest = self._spikes.highest_usual_loss
        return highest if math.isfinite(highest) else None

    def _on_anomaly(self, anomaly: Anomaly) -> None:
        if not self._may_go_back():
            # Starting over because of a loss costs more than an unusual loss.
            self._spikes.tolerate()
            text = "reported only: there is no checkpoint to go back to yet"
            self._note(f"since step {anomaly.onset}: {anomaly.text}; {text}")
            return
        self.open = anomaly
        self._send(RequestProposal(kind=RequestKind.RECOVER, reason=announce(anomaly)))

    def _look_at_limit(self, limit: float, step: int) -> None:
        last = self._active_limit
        if self._announced is not None:
            last, since = self._announced
            if step - since >= _LOST_AFTER_STEPS:
                self._announced, last = None, self._active_limit
        if last * _LOWER <= limit <= last * _HIGHER:  # including no limit before and now
            return
        now = self._clock()
        due = self._next_lower_at if limit < last < math.inf else self._next_limit_at
        if now < due:
            if limit <= last * _OUTGROWN:
                return
            limit = math.inf
        if limit < math.inf:
            self._next_limit_at = now + _LIMIT_EVERY_S
            self._next_lower_at = now + _LOWER_EVERY_S
        self._announced = (limit, step)
        self._send(RequestProposal(kind=RequestKind.LIMIT, reason=repr(limit)))

    def _note(self, text: str) -> None:
        if self._noted is not None:
            self._noted(text)

    def _tell_outliers(self) -> None:
        now = self._clock()
        if now < self._next_outliers_at:
            return
        self._next_outliers_at = now + _OUTLIERS_EVERY_S
        count = self._spikes.outliers - self._told_outliers
        self._told_outliers = self._spikes.outliers
        steps = "1 step" if count == 1 else f"{count} steps"
        self._note(f"{steps} with a loss far above the usual (above {self._spikes.bound:.4g} now)")


class WatchedSteps:
    """Passes steps to a monitor: short ones in groups, while their updates are being made.

    The monitor only proposes, so ranks may get its findings some steps later.  Most of the cost of
    a single step is that its code is no longer in any cache.

    Args:
        monitor: None on every rank but the first, which watches for all.
        clock: In seconds.
    """

    def __init__(
        self, monitor: SpikeMonitor | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._monitor = monitor
        self._clock = clock
        self._steps: list[tuple[int, float, float, bool]] = []
        self._handed_over_at = -math.inf

    def add(self, step: int, norm: float, loss: float, *, applied: bool = True) -> None:
        """Add one more step, in order."""
        if self._monitor is None:
            return
        self._steps.append((step, norm, loss, applied))
        long = self._clock() - self._handed_over_at >= _LONG_S
        if long or not applied or len(self._steps) >= _TOGETHER:
            self.hand_over()

    def hand_over(self) -> None:
        """Pass all remaining steps to the monitor."""
        if self._monitor is not None:
            self._handed_over_at = self._clock()
            for step, norm, loss, applied in self._steps:
                self._monitor.record(step, norm=norm, loss=loss, applied=applied)
        self._steps.clear()

    def clear(self) -> None:
        """Training restarts somewhere else."""
        self._steps.clear()


def limit_in(text: str) -> float:
    """The limit in the reason of a request; the largest float32 stands for no limit."""
    try:
        limit = float(text)
    except ValueError as error:
        raise ControlChannelError(
            f"the announcement of a limit can't be read: {text[:40]!r}",
            next_step="Are all ranks running the same version of slurm_forge?",
        ) from error
    return limit if 0.0 < limit < _NO_LIMIT else LARGEST
