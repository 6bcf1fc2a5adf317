"""Samples: datasets, samplers, sources with a state, loader workers; called by the training loop.

Entry: ``batches``.
"""
