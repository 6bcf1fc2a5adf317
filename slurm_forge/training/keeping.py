"""Rank 0's book of the run's checkpoints: which are trusted, which stay, whether one more fits."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from slurm_forge.control import protocol as p
from slurm_forge.errors import CheckpointError, FencedError
from slurm_forge.journal import JournalWriter, Known, KnownCheckpoint, RunState
from slurm_forge.journal import known as k
from slurm_forge.journal.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointJudged,
    CheckpointMeasured,
    CheckpointRejected,
    CheckpointsPruned,
    CheckpointWitnessed,
    Event,
    Note,
)
from slurm_forge.spec.job import BestMode, CheckpointSpec
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.retention import Present, Rules, wanted
from slurm_forge.store.room import room_in, shortage
from slurm_forge.vocabulary.trust import Trust

__all__ = ["Keeping"]

#: Checkpoints of its own after which a launch needs the one it was resumed from no more.
_TRUSTED = 2
#: Disks have bad days: a save is expected to take so many times what the last ones took.
_CAUTION = 1.5
_REMEMBERED = 3
_OTHERWISE = "training went on otherwise"


class Keeping:
    """One object per launch, on rank 0 only.  May be used from several threads.

    ``seconds_left`` says how long there is until the launch is ended, None while nobody has said.
    ``current`` is (attempt, launch).  A journal that can't be written stops nothing here.
    """

    def __init__(
        self,
        store: CheckpointStore,
        asked: CheckpointSpec,
        *,
        journal: JournalWriter,
        current: tuple[int, int],
        fence: Callable[[], None],
        seconds_left: Callable[[], float | None],
        tell: Callable[[p.Message], None],
    ) -> None:
        self._store = store
        self._asked = asked
        self._journal = journal
        self._current = current
        self._fence = fence
        self._seconds_left = seconds_left
        self._tell = tell
        self._lock = threading.RLock()
        self._known: Known = ()
        self._history = RunState()
        self._damaged: set[CheckpointName] = set()
        self._resumed_from: CheckpointName | None = None
        #: What may become good, and the step since which training has been healthy.
        self._pending: dict[CheckpointName, int] = {}
        #: The step that was evaluated last with a better result than any before, and the result.
        self._evaluated: tuple[int, float] | None = None
        self._said: set[str] = set()

    # -- resuming ----------------------------------------------------------------------------

    def recall(self, state: RunState) -> None:
        """What history knows."""
        self._history, self._known = state, state.known

    def eligible(self, name: CheckpointName) -> str | None:
        """Why a checkpoint is not to be resumed from, or None."""
        return self._history.refusal(name)

    def rejected(self, name: CheckpointName, reason: str) -> None:
        """It was passed over.  What was only suspect is no less whole than it was."""
        if self.eligible(name) is None:
            self._damaged.add(name)
        self._write(CheckpointRejected(name=str(name), reason=reason))

    def resumed(self, name: CheckpointName) -> None:
        """It was read, every byte of it with the right hash, and training goes on from it."""
        with self._lock:
            self._resumed_from = name
            self._judge(name, Trust.VERIFIED, "read back when training was resumed from it", None)
            self._expect(name, name.step)

    # -- while training goes on --------------------------------------------------------------

    def stepped(self, step: int, *, healthy: bool) -> None:
        """A step is over.  What has been followed by enough healthy ones is good."""
        if not self._pending:
            return
        with self._lock:
            for name, since in list(self._pending.items()):
                if not healthy:
                    self._pending[name] = step
                elif step > name.step and step - since >= self._asked.good_after_steps:
                    del self._pending[name]
                    self._judge(name, Trust.GOOD, f"{step - since} healthy steps followed", step)

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
    ) -> None:
        """A checkpoint is on disk: told, and room is made."""
        seconds, blocked_s = lasted.total_seconds(), blocked.total_seconds()
        with self._lock:
            found = KnownCheckpoint(
                name=name,
                trust=Trust.SUSPECT if findings else Trust.WRITTEN,
                why="; ".join(findings),
                time=time,
                size=size,
                seconds=seconds,
                blocked_s=blocked_s,
            )
            self._known = k.committed(self._known, found)
            if not findings:
                self._expect(name, name.step)
        self._write(
            CheckpointCommitted(
                name=str(name),
                step=name.step,
                reason=reason,
                seconds=seconds,
                blocked_s=blocked_s,
                size=size,
                findings=tuple(findings),
            )
        )
        with self._lock:
            self._measure(name)
        self._tell(p.Committed(step=name.step, seconds=seconds, blocked_s=blocked_s))
        self.prune()

    def failed(self, step: int, reason: str) -> None:
        """A save came to nothing."""
        self._write(CheckpointFailed(step=step, reason=reason))
        self._tell(p.NotCommitted(step=step, reason=reason))

    def evaluated(self, step: int, logged: Mapping[str, Any]) -> bool:
        """An evaluation after ``step`` steps logged this; whether it is to be saved for that."""
        asked = self._asked.keep_best
        if asked is None:
            return False
        if asked.metric not in logged:
            self._say_once(f"keep_best: the evaluation logged no {asked.metric!r}")
            return False
        value = float(logged[asked.metric])
        with self._lock:
            best = self.best
            if not math.isfinite(value) or (best is not None and not self._better(value, best)):
                return False
            self._evaluated = (step, value)
            there = [each.name for each in self._known if self._is_mine(each.name, step)]
            for name in there:
                self._measure(name)
            return not there

    def witnessed(self, step: int, loss: float) -> None:
        """The first micro-batch behind what this launch saved at that step had this loss."""
        with self._lock:
            for name in [each.name for each in self._known if self._is_mine(each.name, step)]:
                self._known = k.witnessed(self._known, name, loss)
                self._write(CheckpointWitnessed(name=str(name), loss=loss))

    def witness_of(self, name: CheckpointName) -> float | None:
        """The loss of the first micro-batch behind a checkpoint, where it was computed once."""
        known = self._find(name)
        return None if known is None else known.witness

    def doubt(self, why: str) -> bool:
        """What was resumed from does not lead on to where it was written: it is suspect now.

        False, and nothing is done, where that was said of another one before: then it is not the
        checkpoint that is wrong.
        """
        with self._lock:
            name = self._resumed_from
            if name is None or any(_OTHERWISE in each.why for each in self._known):
                return False
            self._judge(name, Trust.SUSPECT, f"{_OTHERWISE}: {why}", None)
            return True

    def say(self, text: str) -> None:
        """Something worth telling."""
        self._write(Note(text=text))

    def _measure(self, name: CheckpointName) -> None:
        """Note the metric of a checkpoint of the step that was evaluated last."""
        asked, evaluated = self._asked.keep_best, self._evaluated
        if asked is None or evaluated is None or evaluated[0] != name.step:
            return
        value = evaluated[1]
        self._known = k.measured(self._known, name, value)
        self._write(CheckpointMeasured(name=str(name), metric=asked.metric, value=value))

    def _is_mine(self, name: CheckpointName, step: int) -> bool:
        return (name.step, name.attempt, name.launch) == (step, *self._current)

    def _better(self, value: float, than: float) -> bool:
        asked = self._asked.keep_best
        return value < than if asked and asked.mode is BestMode.MIN else value > than

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._write(Note(text=text))

    @property
    def best(self) -> float | None:
        """The best value of the metric that is kept by, among the checkpoints that are there."""
        mode = self._asked.keep_best
        found = [
            each.metric
            for each in self._known
            if each.metric is not None and each.trust is not Trust.SUSPECT
        ]
        if mode is None or not found:
            return None
        return min(found) if mode.mode is BestMode.MIN else max(found)

    # -- room and time -----------------------------------------------------------------------

    def permit(self, size: int, files: int) -> None:
        """Raise CheckpointError where a save had better not be begun: no room, or no time."""
        short = shortage(room_in(self._store.directory), size=size, files=files)
        if short is not None:
            self.make_room(str(short.message))
            short = shortage(room_in(self._store.directory), size=size, files=files)
        if short is not None:
            raise short
        left, takes = self._seconds_left(), self._takes(size)
        if left is not None and takes is not None and takes > left:
            raise CheckpointError(
                f"a save takes about {takes:.0f} s (with a margin), and {left:.0f} s are left",
                next_step="Nothing was written; the run goes on from the checkpoint before. "
                "More grace time, or a longer lead: in the job file, would help.",
            )

    def make_room(self, reason: str) -> None:
        """Delete all that may be deleted: never fewer than two verified and the newest good."""
        self._delete(lambda present: wanted(present, Rules(last=1)), f"to make room: {reason}")

    def prune(self) -> None:
        """Delete what the job does not ask to keep."""
        rules = self._asked.rules
        self._delete(lambda present: wanted(present, rules), "retention")

    def _delete(
        self, keep: Callable[[Sequence[Present]], Collection[CheckpointName]], reason: str
    ) -> None:
        with self._lock, contextlib.suppress(OSError, FencedError):  # the next save asks again
            pruned = self._store.prune(
                lambda names: self._kept(names, keep),
                self._fence,
                current=self._current,
                distrusted=frozenset(self._damaged),
                suspect=frozenset(e.name for e in self._known if e.trust is Trust.SUSPECT),
            )
            if pruned.removed:
                self._known = k.pruned(self._known, pruned.removed)
                for name in pruned.removed:
                    self._pending.pop(name, None)
                names = tuple(str(name) for name in pruned.removed)
                self._write(CheckpointsPruned(names=names, reason=reason))

    def _kept(
        self,
        names: Sequence[CheckpointName],
        keep: Callable[[Sequence[Present]], Collection[CheckpointName]],
    ) -> set[CheckpointName]:
        kept = set(keep([self._present(name) for name in names]))
        # A late commit of a fenced attempt may have a higher step: it takes no place of ours.
        mine = [name for name in names if (name.attempt, name.launch) == self._current]
        kept.update(mine[:1])
        # What this launch was resumed from is known to load; its own are not yet.
        if self._resumed_from is not None and len(mine) < _TRUSTED:
            kept.add(self._resumed_from)
        return kept

    def _present(self, name: CheckpointName) -> Present:
        known = self._find(name)
        if known is None:
            return Present(name=name)
        return Present(name=name, trust=known.trust, time=known.time or None, metric=known.metric)

    def _takes(self, size: int) -> float | None:
        """Seconds that a save of ``size`` bytes is expected to take at most."""
        seen = [each for each in self._known if each.size and each.seconds][-_REMEMBERED:]
        if not seen:
            return None
        return _CAUTION * max(each.seconds * max(1.0, size / each.size) for each in seen)

    # -- the book ----------------------------------------------------------------------------

    def _find(self, name: CheckpointName) -> KnownCheckpoint | None:
        return next((each for each in self._known if each.name == name), None)

    def _expect(self, name: CheckpointName, since: int) -> None:
        known = self._find(name)
        if known is not None and known.trust in (Trust.WRITTEN, Trust.VERIFIED):
            self._pending[name] = since

    def _judge(self, name: CheckpointName, trust: Trust, why: str, step: int | None) -> None:
        before = self._find(name)
        self._known = k.judged(self._known, name, trust, why, by_person=False)
        after = self._find(name)
        if after is not None and (before is None or after.trust is not before.trust):
            self._write(CheckpointJudged(name=str(name), trust=trust, reason=why, step=step))

    def _write(self, event: Event) -> None:
        # What happened is the same on all ranks: rank 0 alone must not fail over a line about it.
        with contextlib.suppress(OSError):
            self._journal.write(event)
