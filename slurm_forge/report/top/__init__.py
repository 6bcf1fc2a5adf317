"""The live view of many runs: figures from records as they come, and lines; called by ``top``.

Entry: ``view``.
"""
