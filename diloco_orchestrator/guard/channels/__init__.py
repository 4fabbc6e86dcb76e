"""The statistics ("channels") of `SequentialGuard`: each detects one way in which a run goes wrong."""
