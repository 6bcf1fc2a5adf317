"""One attempt of a run: its claim, its evidence, its end.  Used by every front end."""
