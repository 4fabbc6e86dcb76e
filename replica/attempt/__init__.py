"""One launched process of a replica: its claim, its heartbeat, and facts about its machine."""
