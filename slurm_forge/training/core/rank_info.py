"""Which rank of how many a process is: from a Slurm step, submitit, torchrun, or alone.

Also here: which launch of which attempt of which run it belongs to.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_forge.control.brief import LaunchBrief
from slurm_forge.errors import ConfigError
from slurm_forge.knobs import Knobs, LocalRanks
from slurm_forge.run_directory import Fence, RunDirectory
from slurm_forge.slurm.environment import SlurmEnvironment, SpecialStep
from slurm_forge.source.work_tree import GitRevision
from slurm_forge.spec import JobSpec
from slurm_forge.vocabulary.job_change import JobChange


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank of how many this process is, and the job it belongs to.

    ``node`` is Slurm's name of the machine: the host itself may use another name.
    """

    rank: int
    local_rank: int
    world_size: int
    job: str
    restart_count: int
    node: str = ""
    #: Whether it is the first rank on the second node of the step.
    leads_second_node: bool = False
    #: Whether all ranks are known to be on this node.
    one_node: bool = False
    #: Whether torchrun has started it in one of our tasks, and so is its parent.
    below_torchrun: bool = False

    @property
    def host(self) -> str:
        """The name of the machine for evidence, and for excluding it."""
        return self.node or socket.gethostname()


def place_from_environ(environ: Mapping[str, str]) -> RankPlace:
    """From a Slurm step, else from submitit's local executor, torchrun, or a single process.

    If torchrun starts the ranks of a step, its numbers count.
    """
    slurm = SlurmEnvironment.from_environ(environ)
    local = LocalRanks.from_environ(environ)
    if slurm is not None and slurm.procid is not None and "SUBMITIT_LOCAL_JOB_ID" not in environ:
        # In our tasks that start ranks by torchrun, torchrun numbers them; variables that another
        # job's torchrun left in the environment are ignored.
        numbered = Knobs.from_environ(environ).torchrun == f"{slurm.job_id}.{slurm.step}"
        if numbered and local.torchrun:
            return RankPlace(
                rank=local.rank,
                local_rank=local.local_rank,
                world_size=local.world_size,
                job=slurm.job_ref,
                restart_count=slurm.restart_count,
                node=slurm.node_name or "",
                leads_second_node=slurm.procid == 1 and local.local_rank == 0,
                one_node=len(slurm.nodes) == 1,
                below_torchrun=True,
            )
        return RankPlace(
            rank=slurm.procid,
            local_rank=slurm.localid or 0,
            world_size=slurm.ntasks or 1,
            job=slurm.job_ref,
            restart_count=slurm.restart_count,
            node=slurm.node_name or "",
            leads_second_node=slurm.nodeid == 1 and slurm.localid == 0,
            one_node=len(slurm.nodes) == 1,
        )
    return RankPlace(
        rank=local.rank,
        local_rank=local.local_rank,
        world_size=local.world_size,
        one_node=local.one_node,
        job=local.job,
        restart_count=0,
    )


def place_of_script(environ: Mapping[str, str]) -> RankPlace:
    """For a script started by torchrun, by srun, or by neither: then it is alone.

    A batch step has SLURM_PROCID and SLURM_NTASKS, too, and torchrun's workers inherit those of the
    task that torchrun runs in.
    """
    slurm, local = SlurmEnvironment.from_environ(environ), LocalRanks.from_environ(environ)
    place = place_from_environ(environ)
    if slurm is None:
        return place if local.torchrun else replace(place, job=f"{local.job}-{os.getpid()}")
    if slurm.step is SpecialStep.UNKNOWN and not local.torchrun and (slurm.ntasks or 1) > 1:
        raise ConfigError(
            "Slurm's id of this step is of a kind that is not known here: whether srun started "
            f"{slurm.ntasks} of these processes, or the batch script one, can't be told",
            path="environment",
            next_step="Start the ranks with slurm-forge submit, or by torchrun.",
        )
    if local.torchrun or not slurm.in_srun_step:
        alone = not local.torchrun
        place = replace(
            place,
            rank=0 if alone else local.rank,
            local_rank=0 if alone else local.local_rank,
            world_size=1 if alone else local.world_size,
        )
    return replace(
        place,
        job=slurm.job_ref,
        restart_count=slurm.restart_count,
        node=slurm.node_name or "",
        one_node=len(slurm.nodes) == 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank's place in the launch, and the files it works on."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    brief: LaunchBrief
    directory: RunDirectory
    spec: JobSpec
    #: Where the job was submitted, and the environment that this rank was started with.
    folder: Path = Path()
    variables: Mapping[str, str] = field(default_factory=dict)
    #: The run's own directory for checkpoints if the run directory is not writable.
    fallback: Path | None = None
    #: Where it wrote such checkpoints under an earlier job file.
    earlier_fallbacks: tuple[Path, ...] = ()
    #: Of the snapshot that the entry is imported from; None if the work tree is used.
    code: GitRevision | None = None
    #: Deliberate changes of the job since the run began, oldest first; None if no command has
    #: touched the run.
    changes: tuple[JobChange, ...] | None = None

    @property
    def fence(self) -> Fence:
        """Raises once a newer attempt, or a newer launch of this one, has claimed the run."""
        return Fence(self.directory, self.brief.attempt, self.brief.launch)
