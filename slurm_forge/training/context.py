"""Which rank of which launch of which attempt of which run this is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
    #: Where the job was submitted from, and the environment that this rank was started with.
    folder: Path = Path()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def fence(self) -> Fence:
        """Raises once a newer attempt, or a newer launch of this one, has taken the run over."""
        return Fence(self.directory, self.brief.attempt, self.brief.launch)
