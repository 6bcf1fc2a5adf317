"""Which nodes are excluded and where ranks are placed; called by ``launch``.

Entry: ``exclusion``.
"""
