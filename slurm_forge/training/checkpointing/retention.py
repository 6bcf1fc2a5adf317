"""Room for the run's checkpoints: checked before a save, and made after it.  Rank 0 only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_forge.errors import CheckpointError, FencedError
from slurm_forge.journal import JournalWriter, Known, KnownCheckpoint
from slurm_forge.journal import known as k
from slurm_forge.journal.events import CheckpointJudged, CheckpointsPruned, Event
from slurm_forge.spec.job import CheckpointSpec
from slurm_forge.store.directory import CheckpointStore
from slurm_forge.store.identity import CheckpointName
from slurm_forge.store.retention import Present, wanted
from slurm_forge.store.room import free_space, shortage
from slurm_forge.vocabulary.trust import Trust

#: After this many checkpoints of its own, a launch no longer needs the one it resumed from.
_TRUSTED = 2
_REMEMBERED = 3
_FULL = "a save found no space or quota left"


class CheckpointRecords:
    """Hold ``lock`` to read and then write; an unwritable journal stops nothing."""

    def __init__(self, journal: JournalWriter) -> None:
        self._journal = journal
        self.lock = threading.RLock()
        self.checkpoints: Known = ()
        #: Checkpoints that may become good, and the step since which training has been healthy.
        self.unproven: dict[CheckpointName, int] = {}

    def find(self, name: CheckpointName) -> KnownCheckpoint | None:
        """What is known of a checkpoint, if anything."""
        return next((each for each in self.checkpoints if each.name == name), None)

    def expect(self, name: CheckpointName, since: int) -> None:
        """It may become good; training has been healthy since ``since``."""
        checkpoint = self.find(name)
        if checkpoint is not None and checkpoint.trust in (Trust.WRITTEN, Trust.VERIFIED):
            self.unproven[name] = since

    def judge(self, name: CheckpointName, trust: Trust, why: str, step: int | None = None) -> None:
        """Trust it more, or less; ``step`` is the present step if that is the reason."""
        before = self.find(name)
        self.checkpoints = k.judged(self.checkpoints, name, trust, why, by_person=False)
        after = self.find(name)
        if after is not None and (before is None or after.trust is not before.trust):
            self.write(CheckpointJudged(name=str(name), trust=trust, reason=why, step=step))

    def write(self, event: Event) -> None:
        """Write a line into the journal."""
        # The event is the same on all ranks: rank 0 alone must not fail over a line about it.
        with contextlib.suppress(OSError):
            self._journal.write(event)


class Retention:
    """Deletes checkpoints that are not wanted; refuses a save that should not begin."""

    def __init__(
        self,
        records: CheckpointRecords,
        store: CheckpointStore,
        spec: CheckpointSpec,
        *,
        current: tuple[int, int],
        fence: Callable[[], None],
        seconds_left: Callable[[], float | None],
        people: Callable[[], Known | None] | None,
    ) -> None:
        self._records = records
        self._store = store
        self._spec = spec
        self._current = current
        self._fence = fence
        self._seconds_left = seconds_left
        self._people = people
        # Deleting may take long; nobody else waits for it.
        self._deleting = threading.Lock()
        #: Checkpoints that were read and found damaged.
        self.damaged: set[CheckpointName] = set()
        self.resumed_from: CheckpointName | None = None
        #: How many checkpoints existed when one more did not fit: statvfs ignores quotas.
        self._most: int | None = None

    def permit(self, size: int, directory: Path, files: int, *, use_spare: bool = False) -> None:
        """Raise CheckpointError if a save should not begin: no room, or no time."""

        def lacking() -> CheckpointError | None:
            free = free_space(directory)
            return shortage(free, size=size, files=files, use_spare=use_spare)

        # Checkpoints that the job keeps are deleted for room only if no other place is left.
        is_last_place = self._store.fallback in (None, directory)
        most = self._most if is_last_place else None
        if most is not None and len(self._store.candidates()) >= most:
            self.make_room(_FULL)
        short = lacking()
        if short is not None and is_last_place:
            self.make_room(str(short.message))
            short = lacking()
        if short is not None:
            raise short
        seconds_left, takes = self._seconds_left(), self._takes(size)
        if seconds_left is not None and takes is not None and takes > seconds_left:
            raise CheckpointError(
                f"a save takes {takes:.0f} s at least, and {seconds_left:.0f} s are left",
                next_step="Nothing was written; the run continues from the checkpoint before. "
                "More grace time, or a longer lead: in the job file, would help.",
            )

    def make_room(self, reason: str) -> bool:
        """Delete what is only kept for being recent: never fewer than two verified.

        Returns whether anything was deleted.
        """
        rules = replace(self._spec.rules, last=1)
        return self._delete(lambda present: wanted(present, rules), f"to make room: {reason}")

    def ran_out(self) -> bool:
        """A write ran out of space or quota in spite of the estimate; whether there is room now.

        From then on room is made before a save that would be one too many again.
        """
        with contextlib.suppress(OSError):
            self._most = len(self._store.candidates())
        return self.make_room(_FULL)

    def prune(self) -> None:
        """Delete what the job does not keep: a checkpoint was committed."""
        with contextlib.suppress(OSError):
            if self._most is not None and len(self._store.candidates()) > self._most:
                self._most = None  # it did fit
        rules = self._spec.rules
        self._delete(lambda present: wanted(present, rules), "retention")

    def _delete(
        self, keep: Callable[[Sequence[Present]], Collection[CheckpointName]], reason: str
    ) -> bool:
        self._hear_people()
        with self._deleting, contextlib.suppress(OSError, FencedError):  # the next save tries again
            pruned = self._store.prune(
                lambda names: self._names_to_keep(names, keep),
                self._fence,
                current=self._current,
                distrusted=frozenset(self.damaged),
                suspect=frozenset(
                    e.name for e in self._records.checkpoints if e.trust is Trust.SUSPECT
                ),
            )
            if not pruned.removed:
                return False
            with self._records.lock:
                self._records.checkpoints = k.pruned(self._records.checkpoints, pruned.removed)
                for name in pruned.removed:
                    self._records.unproven.pop(name, None)
            names = tuple(str(name) for name in pruned.removed)
            self._records.write(CheckpointsPruned(names=names, reason=reason))
            return True
        return False

    def _names_to_keep(
        self,
        names: Sequence[CheckpointName],
        keep: Callable[[Sequence[Present]], Collection[CheckpointName]],
    ) -> set[CheckpointName]:
        with self._records.lock:
            keeps = set(keep([self._present(name) for name in names]))
            # A late commit of a fenced attempt may have a higher step: it must not displace ours.
            own = [name for name in names if (name.attempt, name.launch) == self._current]
            keeps.update(own[:1])
            # The one that this launch resumed from is known to load; its own are not yet.
            if self.resumed_from is not None and len(own) < _TRUSTED:
                keeps.add(self.resumed_from)
            # With frequent saves none would live long enough to become good.
            waiting = [name for name in names if name in self._records.unproven]
            if waiting:
                keeps.add(min(waiting))
            return keeps

    def _hear_people(self) -> None:
        """Apply promotions and doubts from the command line since the last call."""
        if self._people is None:
            return
        judged = self._people()
        with self._records.lock:
            for each in judged if judged is not None else ():
                if each.by_person:
                    self._records.checkpoints = k.judged(
                        self._records.checkpoints, each.name, each.trust, each.why, by_person=True
                    )

    def _present(self, name: CheckpointName) -> Present:
        checkpoint = self._records.find(name)
        if checkpoint is None:
            return Present(name=name)
        return Present(
            name=name,
            trust=checkpoint.trust,
            time=checkpoint.time or None,
            metric=self.metric(checkpoint),
            epoch=checkpoint.epoch,
        )

    def _takes(self, size: int) -> float | None:
        """Seconds that a save of ``size`` bytes takes at the best recent speed.

        Trying is worthwhile as long as there is a chance: an interrupted save harms none.
        """
        timed = [each for each in self._records.checkpoints if each.size and each.seconds][
            -_REMEMBERED:
        ]
        if not timed:
            return None
        return min(each.seconds * min(1.0, size / each.size) for each in timed)

    def metric(self, checkpoint: KnownCheckpoint) -> float | None:
        """The present retention metric; values of another one are not comparable."""
        rule = self._spec.keep_best
        same = rule is not None and checkpoint.metric_name == rule.metric
        return checkpoint.metric if same else None
