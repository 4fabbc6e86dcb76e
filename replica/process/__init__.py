"""The process of one attempt: its claim, heartbeat, captured output and exit record."""
