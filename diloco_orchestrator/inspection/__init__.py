"""Reads a run from its bucket, finished or not: status, costs, logs, models, verification. Writes no record."""
