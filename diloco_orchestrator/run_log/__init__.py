"""The records of a run in its bucket: reads immutable ones once, checks the hash chain, appends new ones."""
