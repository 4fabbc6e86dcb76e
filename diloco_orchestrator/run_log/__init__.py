"""Reads and writes a run's JSON records, caches immutable ones, and checks that each commit names the one before."""
