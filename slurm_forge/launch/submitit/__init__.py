"""Front end for submitit: rank 0 hosts the hub and the conductor on a thread; called by submitit.

Entry: ``job``.
"""
