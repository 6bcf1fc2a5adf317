"""Skipped steps: counted on every rank, examined, and reported.

All ranks come here together: a verdict is based on the gradient norm over all ranks, and on a limit
that all ranks have from the same agreement.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from slurm_forge.control import Member
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.rank import RequestProposal, UpdateSkipped
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import StepSkipped
from slurm_forge.recovery.monitor.loss_anomaly import (
    Anomaly,
    announce,
)
from slurm_forge.recovery.policy.decide import skips_allowed
from slurm_forge.spec.recovery import Recovery
from slurm_forge.training.core.instability import Instability
from slurm_forge.training.core.run_state import (
    Registry,
    TrainingProgress,
)
from slurm_forge.training.faults.injector import FaultInjector
from slurm_forge.training.instability.diagnosis import StepDiagnoser
from slurm_forge.training.instability.diagnosis_report import Examination
from slurm_forge.training.instability.spike_monitor import SpikeMonitor, WatchedSteps
from slurm_forge.training.instability.step_record import (
    StepRecord,
    together,
    with_loss,
)
from slurm_forge.training.step.gradient_guard import Reading
from slurm_forge.training.step.gradient_norms import parameter_names
from slurm_forge.training.step.update_report import ReportedValues, UpdateReport
from slurm_forge.vocabulary.cause import Cause, Evidence
from slurm_forge.vocabulary.plan import SampleWindow

#: Steps between two examinations: a run that skips every tenth would train at half its speed.
_STEPS_BETWEEN_EXAMINATIONS = 100
#: Except for the first ones of a launch.
_EXAMINATIONS = 50
#: How many steps have their samples remembered.
_REMEMBERED = 256
#: A single batch without anything to predict is harmless.
_BAD_LOSSES = 3


class LaunchGivenUp(BaseException):
    """All ranks leave without saving: the state on disk is better than that in memory."""


class SkipTracker:
    """Processes the verdict of every step; ``trouble`` is the conclusion.

    With ``read_one_step_late`` (on a GPU) a verdict is read when the gradients of the next step are
    queued: the device is never without work.  ``spike_monitor`` is rank 0's, for values that are
    finite but wrong.
    """

    def __init__(
        self,
        policy: Recovery,
        *,
        rank: int,
        progress: TrainingProgress,
        registry: Registry,
        examiner: StepDiagnoser,
        journal: JournalWriter | None,
        member: Member,
        spike_monitor: SpikeMonitor | None,
        fault_injector: FaultInjector,
        read_one_step_late: bool,
    ) -> None:
        self._allowed = {
            cause: max(1, skips_allowed(policy, cause))
            for cause in (Cause.LOSS_SPIKE, Cause.NON_FINITE)
        }
        self._rank = rank
        self._progress = progress
        self._registry = registry
        self._examiner = examiner
        self._journal = journal
        self._member = member
        self._spike_monitor = spike_monitor
        self._fault_injector = fault_injector
        self._keep = 1 if read_one_step_late else 0
        self._watched = WatchedSteps(spike_monitor)
        self._unread: deque[StepRecord] = deque()
        #: Undoes what the present step has computed, once; None outside of ``look_back``.
        self._undo: Callable[[], object] | None = None
        self._names: Mapping[int, str] | None = None
        self._from_stream = False
        self._examined_at: int | None = None
        self._examinations = 0
        self._bad_losses = self._bad_reports = 0
        #: The last steps, each with its first sample and the one after its last: for an incident
        #: that is noticed later.
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=_REMEMBERED)
        #: The first sample of the current series of skipped steps.
        self._skip_streak_from: SampleWindow | None = None
        self._skip_streak_is_finite = True
        self._skip_streak_examined = False
        self._examination: Examination | None = None
        self._journaled_evidence: tuple[Evidence, ...] = ()
        #: This rank's proposal to all, while undecided.
        self._proposed: Anomaly | None = None
        #: Why the weights themselves are not to be trusted: an update that was not skipped.
        self.weights_in_doubt: tuple[str, ...] = ()
        #: What all ranks have to handle before the next step, if anything.
        self.trouble: Instability | None = None

    def record(self, record: StepRecord) -> None:
        """Process one more step."""
        self._recent.append((record.step, record.samples.first, record.samples.stop))
        self._from_stream = record.from_stream
        self._unread.append(record)
        self._read(self._keep)

    def look_back(self, undo: Callable[[], object]) -> bool:
        """Before an update: process the steps before it, whose weights are still there.

        Args:
            undo: Clears what the present step has computed; called if a step is computed again.

        Returns:
            Whether it was called, so that the present step must be computed anew.
        """
        if not self._unread:
            return False
        self._undo = undo
        self._read(0)
        undone, self._undo = self._undo is None, None
        return undone

    def reported(self, step: int, first: int, stop: int, report: UpdateReport) -> None:
        """Process a step of a loop that updates by itself; microseconds if all is well.

        Its samples are those from ``first`` to ``stop``, which is excluded.
        """
        if self._unread or report.values is None:
            self.record(StepRecord.of_report(step, SampleWindow(first, stop), report))
            return
        self._recent.append((step, first, stop))
        self._from_stream = False
        self._take_report(step, report.values)

    def updated(self, step: int, first: int, stop: int, norm: float, loss: float | None) -> bool:
        """Process a step of a loop with one update by ``apply``: microseconds.

        Does nothing and returns False if it needs a ``record``.
        """
        if self._unread:
            return False
        self._recent.append((step, first, stop))
        self._from_stream = False
        self._progress.skipped_in_a_row = 0
        if self._skip_streak_from is not None:
            self._end_skip_streak()
        if loss is not None:
            self._look_at_losses(step, (loss,))
        self._watched.add(step, norm, math.nan if loss is None else loss)
        return True

    def announced(self, anomaly: Anomaly) -> None:
        """Rank 0 has judged the last steps, and all ranks get it between the same two steps."""
        if self.trouble is not None or not self._recent:
            return
        bad = [each for each in self._recent if anomaly.onset <= each[0] <= anomaly.step]
        last = self._recent[-1][0]
        if anomaly.step > last:
            return  # proposed before a rollback, which has answered it
        self.trouble = Instability(
            cause=anomaly.cause,
            onset=min(anomaly.onset, last),
            step=last,
            text=anomaly.text,
            source="rank 0" if anomaly.cause is Cause.LOSS_SPIKE else "all ranks",
            window=SampleWindow(bad[0][1], bad[-1][2]) if bad and self._from_stream else None,
            in_memory=anomaly.in_memory,
            rank=anomaly.rank,
            hosts=anomaly.hosts,
        )

    def found(self, trouble: Instability) -> None:
        """All ranks have found something together: it is handled at the next boundary."""
        self.trouble = self.trouble or trouble

    def read_all(self) -> None:
        """Wait for every pending verdict: before a save."""
        self._read(0)
        self._watched.hand_over()
        if self._spike_monitor is not None:
            self._progress.highest_usual_loss = self._spike_monitor.highest_usual_loss

    def begin(self) -> None:
        """The state has just been resumed: non-finite values in it now are intended."""
        self._examiner.take_as_meant()

    def forget(self) -> None:
        """Training restarts somewhere else."""
        self._unread.clear()
        self._watched.clear()
        self._recent.clear()
        self._examined_at, self._bad_losses, self._proposed = None, 0, None
        self._bad_reports, self.weights_in_doubt = 0, ()
        self._end_skip_streak()
        self.trouble = None

    def _read(self, keep: int) -> None:
        while len(self._unread) > keep:
            record = self._unread.popleft()
            if record.report is not None and not record.applied:
                self._take_report(record.step, record.report.read())
                continue
            readings = [each.verdict.read() for each in record.applied]
            if record.report is not None:
                readings = with_loss(readings, record.report.read().loss)
            if all(reading.applied for reading in readings):
                self._progress.skipped_in_a_row = 0
                if self._skip_streak_from is not None:
                    self._end_skip_streak()
                if record.has_loss:
                    self._look_at_losses(record.step, [reading.loss for reading in readings])
            else:
                finite = all(reading.finite for reading in readings)
                self._skipped(record, readings, finite=finite)
                if not finite:
                    continue  # it does not show which losses and norms are usual
            reading = readings[0] if len(readings) == 1 else together(readings)
            self._watched.add(record.step, reading.norm, reading.loss, applied=reading.applied)

    def _take_report(self, step: int, reported: ReportedValues) -> None:
        """Process a loop's report on an update that it made by itself."""
        loss, norm = reported
        if (loss is None or math.isfinite(loss)) and (norm is None or math.isfinite(norm)):
            self._bad_reports = self._bad_losses = 0
        elif not self._is_sound(step, reported):
            return
        elif loss is not None:
            self._look_at_losses(step, [loss])
        self._progress.skipped_in_a_row = 0
        none = math.nan
        self._watched.add(step, none if norm is None else norm, none if loss is None else loss)

    def _is_sound(self, step: int, reported: ReportedValues) -> bool:
        """Whether an update by the loop itself can have left the weights finite.

        Judged by this rank's values alone: all ranks are informed over the channel.
        """
        loss, norm = reported
        name, value = ("loss", loss) if norm is None else ("gradient norm", norm)
        if value is None or math.isfinite(value):
            self._bad_reports = 0
            return True
        text = f"rank {self._rank} reported the {name} {value} for step {step}"
        scaler = self._registry.scaler
        if scaler is not None and scaler.is_enabled():
            self._bad_reports += 1
            if scaler.get_scale() > 1.0 or self._bad_reports < self._allowed[Cause.NON_FINITE]:
                return False  # the scaler skips the update by itself
            text = (
                f"{text}, {self._bad_reports} steps in a row, and the gradient scale is at most 1"
            )
        else:
            text = f"{text}; the loop applied that update itself, so it is in the weights"
            self.weights_in_doubt = self.weights_in_doubt or (text,)
        self._propose(Anomaly(Cause.NON_FINITE, step, step, text))
        return False

    def _look_at_losses(self, step: int, losses: Sequence[float]) -> None:
        """A mean over nothing is NaN and has no gradient: no rank's norm reveals it."""
        loss = next((each for each in losses if not math.isfinite(each)), None)
        if loss is None:
            self._bad_losses = 0
            return
        self._bad_losses += 1
        if self._bad_losses == _BAD_LOSSES:
            text = (
                f"the loss of rank {self._rank} was {loss} in {_BAD_LOSSES} steps in a row, and "
                "its gradients were finite"
            )
            self._propose(Anomaly(Cause.NON_FINITE, step - _BAD_LOSSES + 1, step, text))

    def _propose(self, anomaly: Anomaly) -> None:
        """Propose it to all ranks, unless an earlier proposal is still open."""
        if self._proposed is None:
            self._proposed = anomaly
            self._member.send(RequestProposal(kind=RequestKind.RECOVER, reason=announce(anomaly)))

    @property
    def open_proposal(self) -> Anomaly | None:
        """What this rank has found and all have not decided on."""
        return self._proposed or (None if self._spike_monitor is None else self._spike_monitor.open)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why a state saved now is not to be trusted, as far as this rank knows."""
        if self.trouble is not None:
            return (self.trouble.text,)
        proposal = self.open_proposal
        return () if proposal is None else (proposal.text,)

    def accept_and_continue(self) -> None:
        """Training continues as it is, by a decision of all ranks."""
        self._progress.skipped_in_a_row = 0
        self._proposed, self.weights_in_doubt = None, ()
        self._end_skip_streak()

    def _end_skip_streak(self) -> None:
        self._skip_streak_from, self._skip_streak_is_finite, self._examination = None, True, None
        self._skip_streak_examined = False

    def _skipped(self, record: StepRecord, readings: Sequence[Reading], *, finite: bool) -> None:
        progress = self._progress
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        self._skip_streak_from = self._skip_streak_from or record.samples
        self._skip_streak_is_finite = self._skip_streak_is_finite and finite
        if finite:
            self._member.send(UpdateSkipped(step=record.step))
        searching = not finite and self._scaler_searches()
        if not searching:
            self._examine(record, finite=finite)
        self._journal_skip(record, readings)
        if record.unprotected:
            # The update was skipped, and yet the model has changed.
            names = ", ".join(record.unprotected[:3])
            self._trouble(record, f"{_what(finite)}, and {names} can't be put back")
            return
        if self._examination is not None and self._examination.state and not searching:
            state = "; ".join(self._examination.state)
            self._trouble(record, f"{_what(finite)}, and no other batch would help: {state}")
            return
        if searching:
            return  # a scaler that can still decrease is looking for its scale: no incident
        cause = Cause.LOSS_SPIKE if self._skip_streak_is_finite else Cause.NON_FINITE
        if progress.skipped_in_a_row < self._allowed[cause]:
            return
        self._trouble(record, f"{progress.skipped_in_a_row} steps in a row had {_what(finite)}")

    def _trouble(self, record: StepRecord, text: str) -> None:
        first, examination = self._skip_streak_from or record.samples, self._examination
        row = self._progress.skipped_in_a_row
        self.trouble = Instability(
            cause=Cause.LOSS_SPIKE if self._skip_streak_is_finite else Cause.NON_FINITE,
            onset=record.step - row + 1,
            step=record.step,
            text=text,
            window=SampleWindow(first.first, record.samples.stop) if record.from_stream else None,
            evidence=() if examination is None else examination.evidence(),
            repeats=None if examination is None else examination.repeats,
            in_memory=examination is not None and bool(examination.state),
            rank=None if examination is None else examination.rank,
            # A node is suspected only if the same step was fine when repeated.
            hosts=()
            if examination is None or examination.repeats is not False
            else examination.hosts,
        )

    def _examine(self, record: StepRecord, *, finite: bool) -> None:
        """The expensive questions, once per series: all ranks together.

        Not if the norm is finite: should ranks disagree on which side of the limit it is, none may
        wait for the others here (``launch/conductor/skip_consistency`` detects that).
        """
        if finite or self._skip_streak_examined:
            return
        self._skip_streak_examined = True
        again, self._examinations = self._examined_at, self._examinations + 1
        soon = again is not None and 0 <= record.step - again < _STEPS_BETWEEN_EXAMINATIONS
        if soon and self._examinations > _EXAMINATIONS:
            return
        self._examined_at = record.step
        # If a later step was applied, the weights have changed: nothing can be recomputed.
        weights_moved = any(
            all(each.verdict.read().applied for each in later.applied) for later in self._unread
        )
        replay = None if weights_moved else record.compute_loss
        without = "the weights have moved on" if weights_moved else ""
        if self._names is None:
            self._names = parameter_names(self._registry.models)
        blame = [part for each in record.applied for part in each.blame(self._names)]
        if self._undo is not None and replay is not None and record.batch is not None:
            self._undo()
            self._undo = None
        faults = self._fault_injector
        with faults.replay() if faults.active else contextlib.nullcontext():
            self._examination = self._examiner.examine(
                batch=record.batch,
                compute_loss=replay,
                loss=record.own_loss(),
                blame=blame,
                generators=record.generators,
                no_replay=without,
            )

    def _journal_skip(self, record: StepRecord, readings: Sequence[Reading]) -> None:
        if self._journal is None:
            return
        evidence = () if self._examination is None else self._examination.evidence()
        if evidence == self._journaled_evidence:
            evidence = ()  # reported with the first step of the series
        else:
            self._journaled_evidence = evidence
        large = [f"{each.norm:.4g}" for each in readings if each.finite and not each.applied]
        if large:
            evidence = (
                Evidence("gradient norm", f"{', '.join(large)}: above the limit"),
                *evidence,
            )
        with contextlib.suppress(OSError):  # rank 0 alone must not fail over a note about it
            self._journal.write(
                StepSkipped(
                    step=record.step,
                    first_sample=record.samples.first,
                    samples=record.samples.stop - record.samples.first,
                    consecutive=self._progress.skipped_in_a_row,
                    evidence=evidence,
                )
            )

    def _scaler_searches(self) -> bool:
        scaler = self._registry.scaler
        return scaler is not None and scaler.get_scale() > 1.0


def _what(finite: bool) -> str:
    return "a gradient norm above the limit" if finite else "a non-finite gradient"
