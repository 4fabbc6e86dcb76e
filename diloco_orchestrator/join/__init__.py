"""Machines that join a run through its bucket: an executor offers attempts in it, a machine runs them."""
