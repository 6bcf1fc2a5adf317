"""Typed Slurm records, and the one client that runs its commands; used by all packages above.

Nothing here decides anything: text becomes values, and the client runs Slurm's own commands.

Entry: ``client``.
"""
