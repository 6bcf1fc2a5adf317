"""Front end for this machine without Slurm; called by ``run`` and the local executor."""
