"""A checkpoint as files that need no slurm_forge; a process of its own."""
