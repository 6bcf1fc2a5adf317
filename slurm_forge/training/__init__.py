"""Inside a rank: the ``Run`` object and its parts; started by ``srun`` as processes of their own.

Besides ``slurm_forge.checkpoint`` the only room that imports torch.  Nothing is imported here, so
that importing the package costs nothing.
"""
