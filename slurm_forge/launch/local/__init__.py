"""Front end for this machine without Slurm; called by ``run`` and by the local executor.

Entry: ``runner``.
"""
