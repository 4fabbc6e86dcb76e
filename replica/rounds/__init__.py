"""One replica's part in the rounds of a run: publish a contribution, decide, commit, apply the outer step."""
