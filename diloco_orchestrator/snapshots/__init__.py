"""Snapshots of the global model: their files in the bucket, and bases rebuilt from a snapshot and later commits."""
