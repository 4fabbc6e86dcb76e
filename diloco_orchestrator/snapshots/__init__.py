"""Snapshots of the global model: their files in the bucket, and a base rebuilt from one and the commits after it."""
