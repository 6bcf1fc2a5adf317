"""What is done about an incident, by the run's own policy and what its job asks Slurm for."""

from __future__ import annotations

from slurm_forge.journal import RunState
from slurm_forge.launch.requeue.job_update import memory_asked, nodes_asked, time_asked
from slurm_forge.recovery import decide
from slurm_forge.recovery.incident.launch_facts import ProgramCheckpoints
from slurm_forge.recovery.nodes.placement import AllocationState
from slurm_forge.slurm.records import JobRecord
from slurm_forge.spec.run_file import RunFile
from slurm_forge.vocabulary.decision import Decision, Incident
from slurm_forge.vocabulary.plan import Variable


def next_decision(
    file: RunFile,
    state: RunState,
    incident: Incident,
    *,
    record: JobRecord | None,
    now: float,
    on_hang: tuple[Variable, ...],
    allocation_state: AllocationState | None = None,
    allocation: bool = True,
    program: ProgramCheckpoints | None = None,
) -> Decision:
    """The decision about the end of a launch; pure.

    Args:
        file: The run, as it was submitted.
        state: What its journal says, the incident included.
        incident: What ended the launch.
        record: What Slurm says of the job.
        now: Seconds since 1970.
        on_hang: The site's variables for after a hang.
        allocation_state: What is left of the allocation, where the job outlives nodes that it
            loses.
        allocation: Whether the job still has its nodes.
        program: What a program with checkpoints of its own could go back to.
    """
    job = file.job
    return decide(
        job.recovery,
        state,
        incident,
        batch_coupled=job.batch_coupled,
        mem=memory_asked(job, record),
        time=time_asked(job, record),
        nodes=state.plan.nodes or nodes_asked(job),
        now=now,
        allocation_state=allocation_state,
        allocation=allocation,
        on_hang=on_hang,
        program=program,
    )
