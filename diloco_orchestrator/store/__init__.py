"""Object storage: the store interface, its engines, retries, and the probe of a new bucket."""
