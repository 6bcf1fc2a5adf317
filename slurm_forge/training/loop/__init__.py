"""The ``Run`` object and what it is composed of."""
