"""Snapshots of the global model: their files in the bucket, and any base rebuilt from one and later commits."""
