"""The ``Run`` object: batches, boundaries, resume, recovery; called by the user's function.

``batch_loop`` is the loop of ``run.batches``, ``custom_loop`` that of ``run.steps`` and
``run.advance``.

Entry: ``run``.
"""
