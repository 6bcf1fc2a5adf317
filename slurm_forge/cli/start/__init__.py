"""Verbs that begin a run (``init``, ``submit``, ``run``, ``exec``, …); called by ``cli.main``.

Entry: ``submit``.
"""
