"""Faults injected on request, for rehearsals and tests."""
