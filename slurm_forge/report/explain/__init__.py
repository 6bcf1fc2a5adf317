"""The whole history of a run, as values and as text; called by the verb ``explain``.

Entry: ``explain``.
"""
