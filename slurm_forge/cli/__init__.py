"""The command ``slurm-forge``: verbs that read run directories and talk to Slurm for a person.

Every verb imports what it needs when it is used, so that the command answers at once.
"""
