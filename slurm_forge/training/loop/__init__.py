"""The ``Run`` object: batches, boundaries, resume, recovery; called by the user's function.

Entry: ``run``.
"""
