"""What ``doctor --live`` and ``probe`` start on a cluster; called by the command line.

Entry: ``live_check``.
"""
