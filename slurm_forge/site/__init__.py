"""What is true of one cluster and not of Slurm in general: facts in YAML files, never in code.

Unknown is ``None`` throughout, and ``None`` means "ask Slurm" or "nobody has told us yet".
"""
