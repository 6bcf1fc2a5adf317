"""Through how many files of the package one act runs: what a reader has to open to follow it."""
