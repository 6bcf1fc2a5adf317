"""The messages of the control channel and their encoding; used by both of its ends.

Entry: ``protocol``.
"""
