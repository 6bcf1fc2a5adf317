"""Looks after many runs from outside their jobs; called by the verb ``watch``.

Entry: ``watcher``.
"""
