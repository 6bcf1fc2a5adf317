"""What happened in a run, from journal records to values; used by ``status`` and ``explain``.

Entry: ``story``.
"""
