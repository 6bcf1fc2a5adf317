"""Nouns and primitives of a rank's process: ``Loss``, sample order, groups; used by all of it.

Entry: ``step_boundary``.
"""
