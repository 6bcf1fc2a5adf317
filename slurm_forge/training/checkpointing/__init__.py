"""What a run saves, keeps, compares and resumes; called by the training loop.

Rank 0 keeps the ``catalog`` in the journal: every commit, judgement, metric and deletion is an
event. A checkpoint is good once enough healthy steps followed it; after an instability the fold
itself makes suspect what was not good yet, so that every later reader agrees.  Which ones stay is
decided by ``store.retention``.

Entry: ``saver``.
"""
