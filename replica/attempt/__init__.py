"""One launched process of a replica: its claim, heartbeat, output, and the facts of its machine."""
