"""The part of one replica in the rounds of a run: contribute, verify the others, decide, commit, follow."""
