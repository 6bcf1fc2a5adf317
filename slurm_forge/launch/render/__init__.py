"""Pure: a job file and a site become sbatch options, a script and an environment."""
