"""Figures that a person can measure again: each module prints a table and takes ``--json FILE``."""
