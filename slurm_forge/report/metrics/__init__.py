"""Figures of many runs for Prometheus, and what shows and watches them; used by ``metrics``.

Entry: ``exposition``.
"""
