"""What a checkpoint holds: a training state as tensors and JSON, and its index."""
