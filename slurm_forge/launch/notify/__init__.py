"""Messages about a run, sent through Apprise in a process of their own; started by batch steps.

Entry: ``main``.
"""
