"""The verbs ``checkpoints`` and ``export``; called by ``cli.main``.

Entry: ``checkpoints``.
"""
