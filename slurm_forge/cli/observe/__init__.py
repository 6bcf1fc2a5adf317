"""Verbs that only read (``status``, ``explain``, ``watch``); called by ``cli.main``.

Entry: ``status``.
"""
