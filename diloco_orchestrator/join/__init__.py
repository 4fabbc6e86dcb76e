"""Machines that join a run through its bucket: the executor offers attempts, a machine takes and runs them."""
