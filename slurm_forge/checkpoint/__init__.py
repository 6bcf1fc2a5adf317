"""Checkpoints, committed atomically: stage, seal, rename; called by ``training.checkpointing``.

A checkpoint is ``rank-00000.data`` … (raw tensors, one file per rank), ``index.json`` (which
tensors, which shards, where) and ``manifest.json`` (names, sizes, a hash per 4 MiB, the rest of the
state). Nothing in it is a pickle.  Everything here imports torch; nothing below this layer does.
"""
