"""Loading: the newest complete checkpoint, and checkpoints that DCP wrote."""
