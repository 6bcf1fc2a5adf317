"""What submitit has pickled in earlier versions, under the names that are in the pickles."""

from slurm_forge.launch.submitit.job import ForgeJob

__all__ = ["ForgeJob"]
