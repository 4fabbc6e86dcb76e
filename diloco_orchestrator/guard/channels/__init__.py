"""The channels of `SequentialGuard`: each judges one way in which a run goes wrong, by numbers alone."""
