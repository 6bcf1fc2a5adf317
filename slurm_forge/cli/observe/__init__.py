"""``status``, ``explain`` and ``watch``: verbs that only read, and how they read."""
