"""Bytes by name, create-only: the store interface, its engines, retries and the probe of a new bucket."""
