"""Verbs that begin a run: ``init``, ``config``, ``render``, ``submit``, ``run``, ``exec``,
``policy``.
"""
