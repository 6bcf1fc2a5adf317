"""Checkpoints that exist or do not: written to a stage, sealed by a manifest, published by rename.

Everything here imports torch; nothing below this layer does.
"""
