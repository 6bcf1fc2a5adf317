"""Where a run is now, as values and as text; called by ``status`` and ``watch``.

Entry: ``status``.
"""
