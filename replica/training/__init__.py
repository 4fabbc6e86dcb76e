"""The training loop of one replica: inner steps, synchronisation, resume, and the metrics of its contributions."""
