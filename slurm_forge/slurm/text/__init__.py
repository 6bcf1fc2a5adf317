"""Text of Slurm's commands and files, as values and back.  Pure."""
