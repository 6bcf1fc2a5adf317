"""Makes run directories and submits jobs; called by the command line and the Python API.

Entry: ``submission``.
"""
