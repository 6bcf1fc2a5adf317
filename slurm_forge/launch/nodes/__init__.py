"""The node ledger: which nodes a launch excludes, what it records; called by ``attempt``.

Entry: ``excluded_nodes``.
"""
