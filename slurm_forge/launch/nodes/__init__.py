"""The node ledger as a launch uses it: which nodes it excludes and what it records."""
