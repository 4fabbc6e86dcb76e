"""The records of a run: reads each immutable one once, checks the hash chain, appends new ones."""
