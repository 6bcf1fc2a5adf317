"""What submitit has pickled under the names that are in the pickles."""

from slurm_forge.launch.submitit.job import ForgeCall, ForgeJob

__all__ = ["ForgeCall", "ForgeJob"]
