"""Facts about one cluster, in YAML files, never in code; used by ``launch`` and ``cli``.

Unknown is ``None`` throughout: "ask Slurm", or "not known yet".

Entry: ``model``.
"""
