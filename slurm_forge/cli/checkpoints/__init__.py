"""``checkpoints`` and ``export``."""
