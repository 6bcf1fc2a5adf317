"""Slurm as values, and one client that runs its commands; used by every room above.

Nothing here decides anything: text becomes values, and the client runs Slurm's own commands.

Entry: ``client``.
"""
