"""One attempt (launched process of a replica): the claim that makes it one, its heartbeat, facts about its machine."""
