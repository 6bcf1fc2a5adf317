"""The user's code: its git work tree, snapshots of it; used by ``launch`` and ``training``.

A run that was submitted with ``code: snapshot`` imports its entry from a copy of what the work tree
held then, whatever is edited while the job waits in the queue.

Entry: ``snapshot``.
"""
