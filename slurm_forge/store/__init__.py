"""The directory of checkpoints as files, not tensors; used by ``checkpoint`` and ``cli``.

Names, manifests and hashes.  Nothing here imports torch, so that the command line can use it.

Entry: ``directory``.
"""
