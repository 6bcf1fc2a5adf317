"""Samples: their order, loading and fingerprint; called by the training loop."""
