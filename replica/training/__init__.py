"""The training loop of a replica between two rounds: inner steps, scores, data position, checkpoints."""
