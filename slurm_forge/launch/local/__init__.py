"""Front end for this machine without Slurm; called by ``run``.

Entry: ``runner``.
"""
