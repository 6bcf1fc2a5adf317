"""Figures and timelines of runs for other programs; used by the verbs ``metrics`` and ``trace``.

Entry: ``exposition``.
"""
