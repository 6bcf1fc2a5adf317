"""What a person reads about a run: pure functions from journal records to values to text.

Nothing here reads a file, a clock or the environment: all of that comes in as ``RunFacts``.
"""
