"""Reads and writes a run's JSON records in its bucket, caches immutable ones, and checks the hash chain of commits."""
