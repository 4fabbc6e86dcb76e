"""Machines that join a run through its bucket: an executor offers attempts in it, and a machine runs them."""
