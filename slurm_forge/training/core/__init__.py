"""Nouns and primitives that every part of a rank's process uses."""
