"""How a launch comes to its end: last words, leaving, and what to do with what does not leave."""

from __future__ import annotations

from slurm_forge.control import Hub
from slurm_forge.launch.seen import Launched, Seen

__all__ = ["Ending"]

#: After a first failure: how long the others may say their last words before all are ended.
_LAST_WORDS_S = 0.3
#: How long ranks that were told to leave may take before their launcher is killed.
_LEAVE_S = 5.0
#: A launcher that a kill does not end (its rank sits in the kernel) is waited for no longer.
_GIVE_UP_S = 30.0
#: srun waits for ever for tasks whose step daemon was killed: it never hears of their end (tried
#: on 22.05.8).  Ranks that have said goodbye are gone within seconds.
_GOODBYE_S = 20.0
#: Ranks join before they import anything large; a cold file system may take minutes all the same.
_JOIN_S = 900.0


class Ending:
    """Ends one launch, and says when it is over.  Times are of the conductor's clock, in seconds.

    ``launched`` is None where nobody but the ranks themselves ends them.  ``stays``: it is a
    program that has more to do than train, and is not ended because its ranks are through.
    """

    def __init__(
        self,
        hub: Hub,
        seen: Seen,
        launched: Launched | None,
        started: float,
        *,
        stays: bool = False,
    ) -> None:
        self._hub = hub
        self._seen = seen
        self._launched = launched
        self._started = started
        self._stays = stays
        self._all_said: float | None = None

    def begin(self, now: float) -> None:
        """Somebody failed, is gone, or must be ended: the others may still say why."""
        if self._seen.ending_since is None:
            self._seen.ending_since = now

    def look(self, now: float) -> None:
        """Go on with it, if it has begun, or has to."""
        seen = self._seen
        self._look_for_absent(now)
        if self._everybody_said_goodbye():
            self._all_said = now if self._all_said is None else self._all_said
            over = now - self._all_said >= _GOODBYE_S and not self._stays
            if over and self._launched is not None:
                self._launched.kill()
        if seen.ending_since is None:
            return
        since = now - seen.ending_since
        if since >= _LAST_WORDS_S:
            seen.aborted = True
            self._hub.abort("the launch is over")
        if since >= _LEAVE_S and self._launched is not None:
            self._launched.kill()

    def is_over(self, now: float) -> bool:
        """Whether no rank is left, or none is waited for any more."""
        seen = self._seen
        if seen.deadline_passed:
            return True
        ending = 0.0 if seen.ending_since is None else now - seen.ending_since
        if self._launched is not None:
            return self._launched.poll() is not None or ending > _GIVE_UP_S
        # Who has said goodbye leaves by itself; whoever has not may still be at it, or fail.
        return self._everybody_said_goodbye() or ending > 2 * _LAST_WORDS_S

    def _everybody_said_goodbye(self) -> bool:
        return len(self._seen.said_goodbye) == self._hub.world_size

    def _look_for_absent(self, now: float) -> None:
        """Ranks that never came: a node that does not start its tasks, a step that waits."""
        if self._seen.ending_since is not None or now - self._started < _JOIN_S:
            return
        there = self._hub.members()
        absent = [rank for rank in range(self._hub.world_size) if rank not in there]
        if absent:
            self._seen.absent = tuple(absent)
            self.begin(now)
