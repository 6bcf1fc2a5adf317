"""Skipped steps, loss spikes and their diagnosis; called by the training loop."""
