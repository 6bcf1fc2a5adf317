"""Verdicts during a launch: stalls, probes, stragglers, trends, preflight.  Pure."""
