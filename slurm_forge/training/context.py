"""Which rank of which launch of which attempt of which run this is."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_forge.control.brief import LaunchBrief
from slurm_forge.run_directory import Fence, RunDirectory
from slurm_forge.spec import JobSpec

__all__ = ["RankContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank's place in the launch, and what it works on."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    brief: LaunchBrief
    directory: RunDirectory
    spec: JobSpec

    @property
    def fence(self) -> Fence:
        """Raises once a newer attempt has taken the run over."""
        return Fence(self.directory, self.brief.attempt)
