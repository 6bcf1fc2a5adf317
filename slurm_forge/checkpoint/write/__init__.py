"""Saving: plan, copy, write, seal, publish."""
