"""What a checkpoint holds: a training state as tensors and JSON; used by ``write`` and ``read``.

Entry: ``training_state``.
"""
