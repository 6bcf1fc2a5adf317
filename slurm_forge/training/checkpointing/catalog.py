"""Rank 0's catalog of the run's checkpoints: which are trusted, which stay, whether one more fits.

Also here: judgements that people made on the command line while the run continued.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from slurm_forge.checkpoint.content.health import about_state
from slurm_forge.checkpoint.write.replicas import RankMismatch
from slurm_forge.control.messages.hub import RequestKind
from slurm_forge.control.messages.message import Message
from slurm_forge.control.messages.rank import RequestProposal, SaveCommitted, SaveFailed
from slurm_forge.errors import CheckpointError, ForgeError, StorageFullError
from slurm_forge.journal import JournalWriter, Known, RunState, fold, read_to_fold
from slurm_forge.journal import known as k
from slurm_forge.journal.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointMeasured,
    CheckpointRejected,
    CheckpointWitnessed,
    Note,
)
from slurm_forge.recovery.monitor.loss_anomaly import (
    Anomaly,
    announce,
)
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.job import BestMode, CheckpointSpec
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.manifest import Manifest
from slurm_forge.training.checkpointing.rank_mismatch import anomaly_of
from slurm_forge.training.checkpointing.retention import CheckpointRecords, Retention
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.trust import Trust

_OTHERWISE = "training went on otherwise"


class CheckpointCatalog:
    """One object per launch, on rank 0 only.  May be used from several threads.

    ``seconds_left`` returns how long there is until the launch is ended, None while unknown.
    ``current`` is (attempt, launch).  ``losses_doubtful`` examines the last losses (and may wait
    for the device: it is called once per checkpoint), ``people`` returns people's judgements, or
    None if there is nothing new.  A journal that can't be written stops nothing here.
    """

    def __init__(
        self,
        store: CheckpointStore,
        spec: CheckpointSpec,
        *,
        journal: JournalWriter,
        current: tuple[int, int],
        fence: Callable[[], None],
        seconds_left: Callable[[], float | None],
        tell: Callable[[Message], None],
        losses_doubtful: Callable[[], bool] = lambda: False,
        people: Callable[[], Known | None] | None = None,
    ) -> None:
        self._spec = spec
        self._current = current
        self._seconds_left = seconds_left
        self._send = tell
        self._losses_doubtful = losses_doubtful
        self._records = CheckpointRecords(journal)
        #: Checkpoints that may become good, by the step since which training has been healthy.
        self.unproven = self._records.unproven
        self._house = Retention(
            self._records,
            store,
            spec,
            current=current,
            fence=fence,
            seconds_left=seconds_left,
            people=people,
        )
        self._history = RunState()
        self._refused: set[CheckpointName] = set()
        self._rejected: set[tuple[CheckpointName, str]] = set()
        #: The last evaluated step with a better result than any before, and the result.
        self._evaluated: tuple[int, float] | None = None
        self._reported: set[str] = set()
        self._told_mismatch = False
        #: Step, loss and samples of the first micro-batch after the last save.
        self._reference: tuple[int, float, int] | None = None
        #: Why everything that this launch saves is suspect, if it is.
        self._doubted = ""

    # -- resuming ----------------------------------------------------------------------------

    def recall(self, state: RunState) -> None:
        """Load what the journal knows."""
        with self._records.lock:
            self._history, self._records.checkpoints = state, state.known
            # After a rollback other steps follow: no checkpoint is about to become good any more.
            self._records.unproven.clear()
            self._reference = self._evaluated = None

    def eligible(self, manifest: Manifest) -> str | None:
        """Why a complete checkpoint must not be resumed from, or None."""
        name = manifest.name
        reason = self._history.refusal(name)
        if reason is None and manifest.findings and self._records.find(name) is None:
            # Its line was not journalled: its own findings count.
            reason = "; ".join(manifest.findings)
        if reason is not None:
            self._refused.add(name)
        return reason

    def rejected(self, name: CheckpointName, reason: str) -> None:
        """It was skipped.  One that was only refused is no less complete than before."""
        if name not in self._refused:
            self._house.damaged.add(name)
        if (name, reason) in self._rejected:
            return  # reported when training was rolled back before
        self._rejected.add((name, reason))
        self._records.write(CheckpointRejected(name=str(name), reason=reason))

    def tell_missing(self, there: Collection[CheckpointName], used: CheckpointName | None) -> None:
        """Report checkpoints that the journal knows and that are not ``there``.

        Only those that would have been preferred to ``used``.
        """
        instead = "no checkpoint was used" if used is None else f"{used} was used instead"
        refusal = self._history.refusals()
        for each in self._history.known:
            newer = used is None or each.name > used
            if newer and each.name not in there and refusal(each.name) is None:
                self.rejected(each.name, f"it was saved, but its folder is gone: {instead}")

    def resumed(self, name: CheckpointName) -> None:
        """It was read completely, with all hashes verified, and training continues from it."""
        with self._records.lock:
            self._house.resumed_from = name
            self._records.judge(name, Trust.VERIFIED, "read back when training was resumed from it")
            self._records.expect(name, name.step)

    # -- while training goes on --------------------------------------------------------------

    def stepped(self, step: int, *, healthy: bool) -> None:
        """A step is over.  A checkpoint followed by enough healthy steps is good."""
        with self._records.lock:
            for name, since in list(self._records.unproven.items()):
                if not healthy:
                    self._records.unproven[name] = step
                elif step > name.step and step - since >= self._spec.good_after_steps:
                    if self._losses_doubtful():
                        self._records.unproven[name] = step
                        continue
                    del self._records.unproven[name]
                    self._records.judge(
                        name, Trust.GOOD, f"{step - since} healthy steps followed", step
                    )

    def committed(
        self,
        name: CheckpointName,
        *,
        reason: str,
        size: int,
        lasted: timedelta,
        blocked: timedelta,
        findings: Sequence[str],
        time: float,
        epoch: int | None = None,
    ) -> None:
        """A checkpoint is on disk: journal it, and make room."""
        seconds, blocked_s = lasted.total_seconds(), blocked.total_seconds()
        if self._doubted:
            findings = (*findings, self._doubted)
        event = CheckpointCommitted(
            name=str(name),
            step=name.step,
            reason=reason,
            seconds=seconds,
            blocked_s=blocked_s,
            size=size,
            findings=tuple(findings),
            epoch=epoch,
        )
        with self._records.lock:
            self._records.checkpoints = k.committed(self._records.checkpoints, name, event, time)
            if not findings:
                self._records.expect(name, name.step)
        self._records.write(event)
        with self._records.lock:
            self._measure(name)
            self._record_reference_loss(name)
        self._send(SaveCommitted(step=name.step, seconds=seconds, blocked_s=blocked_s))
        self._alarm(name, [each for each in findings if about_state(each)])
        if self._seconds_left() is None:  # on the way out nobody waits for deletions
            self._house.prune()

    def _alarm(self, name: CheckpointName, findings: Sequence[str]) -> None:
        """The state itself is unsound, which further steps would not cure."""
        if findings and self._seconds_left() is None:
            text = f"in the state after step {name.step}: {'; '.join(findings)}"
            anomaly = Anomaly(Cause.NON_FINITE, name.step, name.step, text, in_memory=True)
            self._send(RequestProposal(kind=RequestKind.RECOVER, reason=announce(anomaly)))

    def ranks_differ(self, mismatch: RankMismatch, *, once: bool) -> None:
        """A save found ranks that differ: all of them must be informed.

        ``once``: the job tolerates it, and one incident per launch is enough.
        """
        if self._seconds_left() is None and not (once and self._told_mismatch):
            self._told_mismatch = True
            reason = announce(anomaly_of(mismatch))
            self._send(RequestProposal(kind=RequestKind.RECOVER, reason=reason))

    def permit(self, size: int, directory: Path, files: int, *, use_spare: bool = False) -> None:
        """Raise CheckpointError if a save should not begin: no room, or no time."""
        self._house.permit(size, directory, files, use_spare=use_spare)

    def failed(self, step: int, error: CheckpointError) -> bool:
        """A save failed; whether room was made for another try."""
        reason = str(error)
        self._records.write(CheckpointFailed(step=step, reason=reason))
        self._send(SaveFailed(step=step, reason=reason))
        return isinstance(error, StorageFullError) and self._house.ran_out()

    def evaluated(self, step: int, logged: Mapping[str, Any]) -> bool:
        """Record an evaluation after ``step`` steps; whether it is a reason to save."""
        rule = self._spec.keep_best
        if rule is None:
            return False
        if rule.metric not in logged:
            self.say_once(f"keep_best: the evaluation logged no {rule.metric!r}")
            return False
        try:
            value = float(logged[rule.metric])
        except (TypeError, ValueError, RuntimeError):
            self.say_once(f"keep_best: {rule.metric!r} is not a number")
            return False
        with self._records.lock:
            best = self.best
            if not math.isfinite(value) or (best is not None and not self._better(value, best)):
                return False
            self._evaluated = (step, value)
            there = [
                each.name for each in self._records.checkpoints if self._is_mine(each.name, step)
            ]
            for name in there:
                self._measure(name)
            return not there

    def note_reference_loss(self, step: int, loss: float, samples: int) -> None:
        """Record the loss of the first micro-batch after what this launch saved at that step."""
        if not math.isfinite(loss):
            return  # nothing that a resume could be compared with
        with self._records.lock:
            self._reference = (step, loss, samples)
            known = self._records.checkpoints
            for name in [each.name for each in known if self._is_mine(each.name, step)]:
                self._record_reference_loss(name)

    def _record_reference_loss(self, name: CheckpointName) -> None:
        checkpoint = self._records.find(name)
        if self._reference is None or self._reference[0] != name.step or checkpoint is None:
            return
        _, loss, samples = self._reference
        if checkpoint.reference_loss is None:
            self._records.checkpoints = k.with_reference_loss(
                self._records.checkpoints, name, loss, samples
            )
            self._records.write(CheckpointWitnessed(name=str(name), loss=loss, samples=samples))

    def reference_loss(self, name: CheckpointName) -> tuple[float, int] | None:
        """The loss of the first micro-batch after a checkpoint, and its samples, if known."""
        checkpoint = self._records.find(name)
        if checkpoint is None or checkpoint.reference_loss is None:
            return None
        return checkpoint.reference_loss, checkpoint.reference_samples

    @property
    def has_usable(self) -> bool:
        """Whether there is a checkpoint that may be resumed from."""
        return any(each.trust is not Trust.SUSPECT for each in self._records.checkpoints)

    def suspect(self, name: CheckpointName, why: str) -> None:
        """Mark it as no longer trusted."""
        with self._records.lock:
            self._records.unproven.pop(name, None)
            self._records.judge(name, Trust.SUSPECT, why)

    def agree_with(self, checkpoints: Known) -> None:
        """Adopt what the journal marks as suspect after an incident that training survives."""
        with self._records.lock:
            for each in checkpoints:
                if each.trust is Trust.SUSPECT and self._records.find(each.name) is not None:
                    self._records.unproven.pop(each.name, None)
            self._records.checkpoints = checkpoints

    def doubt(self, why: str) -> bool:
        """Training from the loaded checkpoint does not match the original: mark it as suspect.

        Returns False and does nothing if another one was doubted before (then the checkpoint is not
        what is wrong), if a person has judged it, or if there is no other.
        """
        with self._records.lock:
            name = self._house.resumed_from
            written = {each.name for each in self._records.checkpoints if self._wrote(each.name)}
            others = [
                each
                for each in self._records.checkpoints
                if each.trust is not Trust.SUSPECT and each.name not in {name, *written}
            ]
            checkpoint = None if name is None else self._records.find(name)
            settled = checkpoint is not None and checkpoint.by_person
            before = any(_OTHERWISE in each.why for each in self._records.checkpoints)
            if name is None or settled or before or not others:
                return False
            self._doubted = f"{_OTHERWISE}: {why}"
            for each in (name, *written):  # later ones are based on it
                self._records.judge(each, Trust.SUSPECT, self._doubted)
            return True

    def _wrote(self, name: CheckpointName) -> bool:
        return (name.attempt, name.launch) == self._current

    def say(self, text: str) -> None:
        """Journal a note."""
        self._records.write(Note(text=text))

    def _measure(self, name: CheckpointName) -> None:
        """Record the metric of a checkpoint of the step that was evaluated last."""
        rule, evaluated = self._spec.keep_best, self._evaluated
        if rule is None or evaluated is None or evaluated[0] != name.step:
            return
        value = evaluated[1]
        self._records.checkpoints = k.measured(self._records.checkpoints, name, rule.metric, value)
        self._records.write(CheckpointMeasured(name=str(name), metric=rule.metric, value=value))

    def _is_mine(self, name: CheckpointName, step: int) -> bool:
        own = (name.attempt, name.launch) == self._current or name == self._house.resumed_from
        return own and name.step == step

    def _better(self, value: float, than: float) -> bool:
        rule = self._spec.keep_best
        return value < than if rule and rule.mode is BestMode.MIN else value > than

    def say_once(self, text: str) -> None:
        """The same, unless this launch has journalled it before."""
        if text not in self._reported:
            self._reported.add(text)
            self.say(text)

    @property
    def best(self) -> float | None:
        """The best value of the retention metric among the existing checkpoints."""
        mode = self._spec.keep_best
        metrics = [
            metric
            for each in self._records.checkpoints
            if (metric := self._house.metric(each)) is not None and each.trust is not Trust.SUSPECT
        ]
        if mode is None or not metrics:
            return None
        return min(metrics) if mode.mode is BestMode.MIN else max(metrics)


class CliJudgements:
    """Reads the journal only if a file written by the command line has grown."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._known_sizes = self._sizes()

    def known(self) -> Known | None:
        """The checkpoints in the journal; None if no judgement is new."""
        sizes = self._sizes()
        if sizes == self._known_sizes:
            return None
        with contextlib.suppress(OSError, ForgeError):
            checkpoints = fold(read_to_fold(self._run)).known
            self._known_sizes = sizes
            return checkpoints
        return None

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for path in self._run.journal.glob("*-cli-*.jsonl"):
                sizes[path.name] = path.stat().st_size
        return sizes
