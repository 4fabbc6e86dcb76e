"""What runs inside a replica's process: the training loop's side of a run. Imports no coordinator and no executor."""
