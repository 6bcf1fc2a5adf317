"""What a person reads about a run: pure functions from journal records to text; called by ``cli``.

Nothing here reads a file, a clock or the environment: all of that is passed in as ``RunFacts``.
"""
