"""Front end for a command that does not import slurm_forge; started by ``exec`` and job files."""
