"""The process per rank that imports once and forks a worker for each launch."""
