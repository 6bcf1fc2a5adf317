"""What ``submit`` and ``policy`` print before a job is submitted; called by these subcommands.

Entry: ``submit_notes``.
"""
