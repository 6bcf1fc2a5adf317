"""The process per rank that imports once and forks a worker for each launch; started by srun.

It records the signals that Slurm sends to direct children only, and reports how workers end.

Entry: ``main``.
"""
