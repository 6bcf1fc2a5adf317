"""Text of Slurm's commands and files, parsed and written; called by ``slurm.client``.  Pure.

Entry: ``parsing``.
"""
