"""Replicas on machines that join a run through its bucket: the executor that offers, the machine that takes."""
