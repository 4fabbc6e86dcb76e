"""Objects of a bucket by name: the store interface, its engines, retries, and the probe of a new bucket."""
