"""The directory of a run's checkpoints: names, manifests, hashed blocks, what stays and what goes.

Knows files and no tensors: nothing here imports torch, so that the command line may look, too.
"""
