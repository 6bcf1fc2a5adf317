"""What slurm_forge is tested with, for other projects to use as well; nothing imports it.

Entry: ``faults``.
"""
