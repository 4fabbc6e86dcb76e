"""One replica's part in the rounds of a run: publish, decide, commit, follow."""
