"""``doctor``, ``probe``, ``sites`` and ``nodes``: verbs about a cluster."""
