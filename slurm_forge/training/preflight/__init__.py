"""Checks of nodes and links before a launch, in a process of their own; started by the rank.

Entry: ``main``.
"""
