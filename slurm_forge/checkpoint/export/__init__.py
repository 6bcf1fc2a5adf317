"""A checkpoint as safetensors, torch or plain DCP, in a process of its own; started by ``export``.

Entry: ``main``.
"""
