"""Verbs that follow many runs at once (``top``, ``metrics``, ``trace``); called by ``cli.main``.

Entry: ``top``.
"""
