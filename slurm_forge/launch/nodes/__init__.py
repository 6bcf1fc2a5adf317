"""The node ledger as a launch uses it: whom it excludes, what it records; called by ``attempt``.

Entry: ``excluded_nodes``.
"""
