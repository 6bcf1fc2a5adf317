"""How ranks look from the hub: what heartbeats and monitors say, and since when that counts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from slurm_forge.control import Hub, MemberView
from slurm_forge.control.messages.rank import heartbeat_every_s
from slurm_forge.control.roster import MonitorView
from slurm_forge.recovery.monitor.probe_verdict import RankSeen
from slurm_forge.recovery.monitor.stalls import RankView

#: A monitor sends a heartbeat every second or two.
_SILENT_S = 8.0
#: Whoever was heard no longer ago than a heartbeat is, and this, talks.
_TALKS_S = 1.5
#: Between two looks of ours: then the job was suspended, and everybody's clock begins anew.
_GAP_S = 3.5
#: By a signal or a debugger: the kernel's letters.
_STOPPED = frozenset("Tt")


class RankViews:
    """One for all who judge the ranks of a launch: a gap that one of them sees, all do.

    Whoever looks says so (``note_poll``), several times a second.
    """

    def __init__(self, hub: Hub, clock: Callable[[], float]) -> None:
        self._hub = hub
        self._last_poll = clock()
        #: How long anything took until then means nothing.
        self.fresh_from = self._last_poll
        self._places: dict[int, tuple[tuple[int, ...], float]] = {}
        #: When the rank that was silent for longest had been heard, at the last look.
        self._oldest = 0.0

    def note_poll(self, now: float) -> None:
        """We look.  If the last look was long ago we were stopped, with the whole job as a rule."""
        if now - self._last_poll > _GAP_S:
            self.reset(now)
        self._last_poll = now

    def reset(self, now: float) -> None:
        """The job was suspended, or we were."""
        self.fresh_from = now

    def views(self, now: float, left_ranks: frozenset[int] = frozenset()) -> dict[int, RankView]:
        """Every rank that has come, as the watchdog judges it; without ``left_ranks``."""
        monitors = self._hub.monitors()
        return {
            rank: self._view(member, monitors.get(rank), now)
            for rank, member in self._hub.members().items()
            if rank not in left_ranks
        }

    @property
    def fresh_s(self) -> float:
        """How long ago a rank may have been heard that talks."""
        return heartbeat_every_s(self._hub.world_size) + _TALKS_S

    def anybody_silent(self, now: float, seconds: float) -> bool:
        """Whether a rank has said nothing for so long: cheap enough for every look."""
        if now - max(self._oldest, self.fresh_from) < seconds:
            return False  # nor is anybody's last message older than the oldest was
        oldest = self._hub.oldest_message_at()
        self._oldest = now if oldest is None else oldest
        return now - max(self._oldest, self.fresh_from) >= seconds

    def all_progress(self, now: float, within: timedelta) -> bool:
        """Whether the monitor of every rank tells of progress within that time: a quick look.

        False also where nobody can tell, and while a process is stopped or its monitor silent.
        """
        progress = self._hub.progress()
        if progress is None or now - progress.oldest_message_at > _SILENT_S:
            return False
        self._places.clear()  # of ranks that had no monitor yet
        return progress.since_s <= within.total_seconds() and _STOPPED.isdisjoint(progress.states)

    def for_probe(
        self,
        now: float,
        limit: Callable[[str], timedelta],
        left_ranks: frozenset[int] = frozenset(),
    ) -> tuple[RankSeen, ...]:
        """Every rank that has come, as the probe judges it; ``limit`` is of a kind of stretch."""
        views = self.views(now, left_ranks)
        members, monitors = self._hub.members(), self._hub.monitors()  # who joins now is in these
        ranks = []
        for rank, view in sorted(views.items()):
            monitor = monitors.get(rank)
            has_monitor = monitor is not None and monitor.connected and monitor.pulse is not None
            last_heard = monitor.last_message_at if monitor is not None and has_monitor else 0.0
            ranks.append(
                RankSeen(
                    rank=rank,
                    host=view.host,
                    silent_s=now - max(members[rank].last_message_at, self.fresh_from),
                    monitor_silent_s=now - max(last_heard, self.fresh_from)
                    if has_monitor
                    else None,
                    state=view.state,
                    step=max(0, members[rank].step),
                    phase=view.phase,
                    kind=view.kind,
                    since=view.since.total_seconds(),
                    limit=limit(view.kind).total_seconds(),
                    fresh_s=self.fresh_s,
                )
            )
        return tuple(ranks)

    def _view(self, member: MemberView, monitor: MonitorView | None, now: float) -> RankView:
        if monitor is None or monitor.pulse is None or not monitor.connected:
            return self._by_heartbeat(member, now)
        pulse = monitor.pulse
        silence = now - max(monitor.last_message_at, self.fresh_from)
        if silence > _SILENT_S and now - max(member.last_message_at, self.fresh_from) < _SILENT_S:
            return self._by_heartbeat(member, now)  # it is the monitor that is stuck
        silent = silence > _SILENT_S
        since = min(monitor.since_s + (silence if silent else 0.0), now - self.fresh_from)
        return RankView(
            rank=member.rank,
            host=member.host,
            place=(pulse.turn, pulse.step, pulse.begun, pulse.phase_no, pulse.poll),
            step=pulse.step,
            phase=pulse.phase,
            kind=pulse.kind,
            since=timedelta(seconds=since),
            state=monitor.state,
            is_silent=silent,
            no_python_for=timedelta(seconds=monitor.mute_s),
        )

    def _by_heartbeat(self, member: MemberView, now: float) -> RankView:
        """Of a rank without a monitor: what its own thread says, while it can."""
        place = (member.rollbacks, member.step, member.begun, 0, 0)
        since_place = self._places.get(member.rank)
        if since_place is None or since_place[0] != place:
            since_place = self._places[member.rank] = (place, now)
        since = now - max(since_place[1], self.fresh_from)
        # Of a phase of the program's own its length is not known: monitors tell of its parts.
        plain = member.begun > 2 and member.phase in ("train", "data", "save")
        kind = member.phase if plain else f"first {member.phase}"
        silent = now - max(member.last_message_at, self.fresh_from) > _SILENT_S
        return RankView(
            rank=member.rank,
            host=member.host,
            place=place,
            step=member.step,
            phase=member.phase,
            kind=kind,
            since=timedelta(seconds=since),
            is_silent=silent,
        )
