"""Slurm as facts (environment, node lists, states, records) and one module of effects (client).

Nothing here decides anything: texts become values, and the client runs Slurm's own commands.
"""
