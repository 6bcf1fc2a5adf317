"""Verbs about a cluster (``doctor``, ``probe``, ``sites``, ``nodes``); called by ``cli.main``.

Entry: ``doctor``.
"""
