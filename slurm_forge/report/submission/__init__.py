"""What ``submit`` and ``policy`` print before a job is submitted; called by these verbs.

Entry: ``submit_notes``.
"""
