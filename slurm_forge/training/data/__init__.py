"""Samples: datasets, samplers, sources with a state, loader workers, the fingerprint of a dataset; called by the training loop.

Entry: ``batches``.
"""
