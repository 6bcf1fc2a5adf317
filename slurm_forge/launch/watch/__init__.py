"""Looks after many runs from outside their jobs; called by ``watch``."""
