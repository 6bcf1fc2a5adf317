"""The command ``slurm-forge``: one module per verb; called by the user.

Every verb imports what it needs when it is used, so that the command answers at once.

Entry: ``main``.
"""
