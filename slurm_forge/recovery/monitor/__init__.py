"""Verdicts during a launch: stalls, probes, stragglers, preflight; called by ``launch.conductor``.

Entry: ``probe_verdict``.
"""
