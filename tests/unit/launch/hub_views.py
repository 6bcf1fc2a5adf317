"""What a hub tells of all ranks together, for those that tests make up rank by rank."""

from collections.abc import Mapping

from slurm_forge.control.messages.rank import Heartbeat
from slurm_forge.control.roster import MemberView, MonitorView, ProgressSummary


class HubViews:
    """Derived from ``members`` and ``monitors``, which whoever derives from it has."""

    world_size: int

    def members(self) -> Mapping[int, MemberView]:
        raise NotImplementedError

    def monitors(self) -> Mapping[int, MonitorView]:
        return {}

    def oldest_message_at(self) -> float | None:
        return min((each.last_message_at for each in self.members().values()), default=None)

    def heartbeats(self) -> list[Heartbeat]:
        return [
            Heartbeat(
                turn=each.rollbacks,
                step=each.step,
                begun=each.begun,
                phase=each.phase,
                started=each.started,
            )
            for each in self.members().values()
        ]

    def progress(self) -> ProgressSummary | None:
        views = [each for each in self.monitors().values() if each.pulse and each.connected]
        if not len(views) == len(self.members()) == self.world_size:
            return None
        return ProgressSummary(
            min(each.last_message_at for each in views),
            max(each.since_s for each in views),
            frozenset(each.state for each in views),
        )
