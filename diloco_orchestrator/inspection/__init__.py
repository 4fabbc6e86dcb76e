"""Reading a run, finished or under way, from its bucket: status, costs, logs, models, verification. Writes nothing."""
