"""Basic types of a rank's process: ``Loss``, ``SampleOrder``, groups; used by all of it.

Entry: ``step_boundary``.
"""
