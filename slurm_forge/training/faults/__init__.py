"""Faults injected on request, for rehearsals and tests; called by the training loop.

Entry: ``injector``.
"""
