"""A workload around the orchestrator: recorded sessions of an agent become training data for a run of replicas.

README.md says how to run it. This folder is a user's package like any other: it is not part of the wheel.
"""
